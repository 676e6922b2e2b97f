"""A sequence in the engine: its tokens, its pages, and how far it is computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from decodefleet_agent.engine.kv_pool import GIVEN_BACK
from decodefleet_agent.messages import Sampling


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt and output are one list of tokens: prefill, decode and recomputation differ only in how many of them are not computed yet."""

    sequence_id: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    priority: int
    arrival: int
    submitted_at: float = field(default_factory=time.monotonic)
    pages: list[int] = field(default_factory=list)  # GIVEN_BACK in place of those outside its window
    digests: list[bytes] = field(default_factory=list)  # of its full pages, as far as known
    computed: int = 0  # tokens whose keys and values are in the pages
    counted_prompt: int = 0  # prompt tokens that the counters have seen
    cached_prompt_tokens: int = 0
    scheduled_at: float | None = None  # time.monotonic() of the first admission
    answered: bool = False  # its first output is out

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def held(self) -> list[int]:
        """The pages that it holds."""
        return [page for page in self.pages if page != GIVEN_BACK]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_left(self) -> int:
        return max(0, self.sampling.max_tokens - (len(self.tokens) - self.prompt_length))

    @property
    def order(self) -> tuple[int, int]:
        """Who runs first: higher priority, then earlier arrival."""
        return (-self.priority, self.arrival)
