"""What the benchmark asks of an engine, and the lines that its process and the benchmark exchange. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """How an engine is started. `path`: a GGUF file, or a directory with safetensors; `format`: one of the peer's own formats."""

    uri: str
    path: str
    shipped: str  # the number format of the file, such as Q4_1
    format: str
    threads: int
    batch: int  # most sequences at once
    context: int  # most tokens of one sequence, prompt and output


@dataclass(frozen=True)
class Loaded:
    """What runs: `version` of the library, `format` as the engine names it, `detail` such as the backend."""

    version: str
    format: str
    detail: str = ""


@dataclass(frozen=True)
class Timing:
    """Seconds from the start of a generation until every sequence had its first token, and until all had their last.

    `rest`: the tokens that came in between, of all sequences. Engines that take prompts one after the other decode the earlier
    ones meanwhile, so it can be less than all but the first of each.
    """

    first: float
    total: float
    rest: int

    @property
    def rate(self) -> float:
        """Tokens per second of decoding alone. Raises ValueError where nothing was left to decode."""
        if self.rest <= 0:
            raise ValueError("all tokens came before the last sequence had its first; ask for more --tokens")
        return self.rest / (self.total - self.first)


class Peer(Protocol):
    """An engine. Its sequences are greedy and go on past the model's end-of-text token."""

    def load(self, load: Load) -> Loaded: ...

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """All prompts together, each continued by exactly `new_tokens` tokens, at least 2. Raises where it came to fewer."""
        ...

    def logprobs(self, windows: list[list[int]]) -> list[list[float]] | None:
        """Per window the log-probability of each token but the first, given those before it; None if the engine does not tell."""
        ...

    def floor(self, rows: int) -> float | None:
        """Seconds that one decoding step's matrix products alone take for this many rows; None if the engine cannot run them alone."""
        ...
