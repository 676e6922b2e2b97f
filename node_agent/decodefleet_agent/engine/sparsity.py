"""Sparse attention's side of the pool: the pages that a sequence under SlidingWindow holds, and those that it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from decodefleet.config import Sparsity, SparsityPolicy
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, pages_for


@dataclass(frozen=True)
class Window:
    """A row at position p sees the positions before `sinks` and the last `tokens`, its own included."""

    sinks: int
    tokens: int

    @property
    def pages(self) -> int:
        """The most that hold what one row sees."""
        return pages_for(self.sinks) + (self.tokens + PAGE_TOKENS - 2) // PAGE_TOKENS + 1

    def unseen(self, position: int) -> range:
        """Indices of the pages that no row from `position` on sees."""
        first = pages_for(self.sinks)
        return range(first, max(first, (position - self.tokens + 1) // PAGE_TOKENS))


def window_of(sparsity: Sparsity) -> Window | None:
    """None where a row may see any page."""
    return Window(sparsity.sinks, sparsity.window) if sparsity.policy == SparsityPolicy.SlidingWindow else None


def described(sparsity: Sparsity) -> str:
    """For a numerics profile; nothing for exact attention."""
    return "" if sparsity.policy == SparsityPolicy.None_ else f" {sparsity.model_dump_json()}"


def pool_context(wanted: int, pages: int, window: Window | None) -> int:
    """Tokens that one sequence alone can have in this pool; any number where its window fits."""
    return wanted if window and pages >= window.pages else min(wanted, pages * PAGE_TOKENS)
