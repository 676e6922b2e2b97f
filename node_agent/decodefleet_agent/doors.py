"""Parts of the engine under the names that the TurboDecode and LightningDecode articles use for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Protocol

from decodefleet_agent.engine.chunks import dynamic_chunk_scheduler
from decodefleet_agent.engine.controllers.base import Limits, Situation
from decodefleet_agent.engine.controllers.sla_feedback import sla_feedback
from decodefleet_agent.engine.kv_pool import KVPool
from decodefleet_agent.engine.step_cost import StepCost
from decodefleet_agent.messages import Targets

__all__ = ["BatchController", "MemoryPool", "dynamic_chunk_scheduler"]


class CurvePoint(Protocol):
    batch: int
    step_seconds: float


class Measured(Protocol):
    """What warm-up measured, as `GetLoad().warm_up` has it: step times by batch size."""

    @property
    def curve(self) -> Iterable[CurvePoint]: ...


class BatchController:
    """SLAFeedback over the measured curve of a model. Raises ValueError if nothing was measured."""

    def __init__(self, model: Measured, time_per_output_token: float | None = None) -> None:
        points = tuple(sorted((point.batch, point.step_seconds) for point in model.curve))
        if not points:
            raise ValueError("model.curve is empty; let the agent warm up first (engine.warmup.enabled)")
        most = points[-1][0]
        self._cost = StepCost(points, 0, ())
        self._limits = Limits(max_batch=most, max_batch_tokens=most, chunk=None, batch_size_threshold=1)
        self._targets = Targets(time_per_output_token)

    def determine_batch(self, pending_requests: int | Sized) -> int:
        """How many of the pending requests to run together: as many as keep the seconds per token, and as were measured."""
        pending = pending_requests if isinstance(pending_requests, int) else len(pending_requests)
        situation = Situation(self._limits, waiting=pending, targets=self._targets, cost=self._cost)
        return min(pending, sla_feedback(situation).max_running)


class MemoryPool:
    """The KV pool's bookkeeping over `total_size` bytes, in pages of `page_size`. Raises ValueError if not one page fits."""

    def __init__(self, total_size: int, page_size: int = 4096) -> None:
        if not 0 < page_size <= total_size:
            raise ValueError(f"total_size is {total_size} and page_size {page_size}; at least one page must fit")
        self.page_size = page_size
        self._pool = KVPool(total_size // page_size)

    @property
    def available(self) -> int:
        """Bytes that `allocate` can still give."""
        return self._pool.available * self.page_size

    def allocate(self, size: int) -> list[int]:
        """Numbers of the pages that hold `size` bytes. Raises MemoryError, and takes none, if fewer are free."""
        if size < 1:
            raise ValueError(f"size is {size}; it must be at least 1")
        pages = self._pool.allocate(-(-size // self.page_size))
        if pages is None:
            raise MemoryError(f"{size} bytes are asked for, and {self.available} are free")
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives back what `allocate` gave."""
        self._pool.release(pages)
