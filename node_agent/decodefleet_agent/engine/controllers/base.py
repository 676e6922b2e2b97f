"""What a batch controller sees before each step, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from decodefleet_agent.engine.chunks import WHOLE_BELOW, Chunk
from decodefleet_agent.engine.sparsity import Window
from decodefleet_agent.engine.step_cost import StepCost, Work
from decodefleet_agent.messages import Targets


@dataclass(frozen=True)
class Limits:
    """What one step may hold, as configured."""

    max_batch: int
    max_batch_tokens: int
    chunk: Chunk
    batch_size_threshold: int  # sequences that wait for free places at which prefill goes before decode
    whole_below: int = WHOLE_BELOW  # prompts shorter than this are never cut into chunks
    reserve_tokens: int = 64  # growth that admission keeps free for each running sequence
    cores: int = 1  # that compute; the chunk formula asks for them
    window: Window | None = None  # what rows see, if not all before them

    @property
    def most_running(self) -> int:
        """Each running sequence has a row in every step, so that none starves."""
        return min(self.max_batch, self.max_batch_tokens)


@dataclass(frozen=True)
class Situation:
    """What the engine knows before a step."""

    limits: Limits
    running: int = 0
    waiting: int = 0
    work: Work = field(default_factory=Work)  # the decoding rows of the step
    prompt_start: int = 0  # of the prompt at the head: tokens that are computed
    prompt_remaining: int = 0  # and those that are not; 0 where no prompt is there
    prompt_waited: float = 0.0  # seconds since it arrived
    targets: Targets = field(default_factory=Targets)
    cost: StepCost | None = None  # None where nothing was measured

    @property
    def burst(self) -> bool:
        """So many sequences wait for places that are free that prompts go first."""
        return min(self.waiting, self.limits.most_running - self.running) >= self.limits.batch_size_threshold


@dataclass(frozen=True)
class Decision:
    """`max_running`: no sequence is admitted beyond it. `prefill_tokens`: rows of prompts in the step; the first one progresses anyway."""

    max_running: int
    prefill_tokens: int


class Controller(Protocol):
    """Plug-in point: a function of the situation, without clock, memory or chance."""

    def __call__(self, situation: Situation, /) -> Decision: ...
