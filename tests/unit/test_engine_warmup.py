"""Warm-up against a backend whose steps take what a formula says: it measures that, and touches nothing that it may not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_world import LIMITS, start
from hypothesis import assume, given
from hypothesis import strategies as st

from decodefleet_agent.engine import memory, warmup
from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.controllers.base import Limits
from decodefleet_agent.engine.kv_pool import pages_for
from decodefleet_agent.engine.step_cost import Work, chunk_pairs
from decodefleet_agent.engine.warmup import made_up, rehearse, warm_up

PER_TOKEN, PER_PAIR = 1e-7, 1e-8


@dataclass
class Clockwork:
    """A backend that moves the clock by what its rows cost."""

    pages: int
    slowness: float = 1.0
    now: float = 0.0
    batches: list[Batch] = field(default_factory=list)
    name = "clockwork"
    revision = 1

    def monotonic(self) -> float:
        return self.now

    def step(self, batch: Batch) -> np.ndarray:
        check(batch, self.pages)
        self.batches.append(batch)
        self.now += self.slowness * seconds(batch)
        return np.zeros((len(batch.spans), 1), np.float32)


def seconds(batch: Batch) -> float:
    total = 0.001
    for span in batch.spans:
        if span.length == 1:
            total += 0.0005 + PER_TOKEN * (span.start + 1)
        else:
            total += 0.0004 * span.length + PER_PAIR * chunk_pairs(span.start, span.length)
    return total


def check(batch: Batch, pages: int) -> None:
    """Every span has the pages that it needs, in the pool, and none that it writes is another's."""
    written: list[int] = []
    read: set[int] = set()
    for span in batch.spans:
        assert len(span.pages) == pages_for(span.start + span.length) and all(0 <= page < pages for page in span.pages)
        whole = span.start // 16
        written += span.pages[whole:]
        read |= set(span.pages[:whole])
    assert len(set(written)) == len(written) and not read & set(written)
    assert batch.rows == sum(span.length for span in batch.spans)


@given(
    pages=st.integers(1, 300),
    decodes=st.integers(0, 70),
    context=st.integers(1, 2000),
    chunk=st.integers(0, 300),
    start=st.integers(0, 50).map(lambda pages: pages * 16),
)
def test_made_up_batches_keep_to_the_pool(pages: int, decodes: int, context: int, chunk: int, start: int) -> None:
    spare = pages - decodes - pages_for(chunk)
    assume(decodes + chunk and spare >= max((context - 1) // 16 if decodes else 0, start // 16 if chunk else 0))
    check(made_up(pages, decodes, context, chunk, start), pages)


@given(
    max_batch=st.integers(1, 100), max_batch_tokens=st.integers(16, 3000), pages=st.integers(1, 400), context=st.integers(16, 4000)
)
def test_any_size_of_pool_and_batch_is_measured(max_batch: int, max_batch_tokens: int, pages: int, context: int) -> None:
    context = min(context, pages * 16)
    backend = Clockwork(pages)
    limits = Limits(max_batch, max_batch_tokens, "Dynamic", 8)
    measured = warm_up(backend, limits, pages, context, lambda done, text: None)  # type: ignore[arg-type]
    assert measured.curve[0].batch == 1 and measured.curve[-1].batch == min(max_batch, max_batch_tokens, pages)
    assert 1 <= measured.context <= context
    assert all(batch.rows <= max_batch_tokens for batch in backend.batches)
    assert all(span.start + span.length <= context for batch in backend.batches for span in batch.spans)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    backend = Clockwork(3000)
    monkeypatch.setattr(warmup, "time", backend)
    return backend


def test_what_is_measured_predicts_other_steps(backend: Clockwork) -> None:
    limits = Limits(24, 2048, "Dynamic", 8)
    progress: list[float] = []
    measured = warm_up(backend, limits, backend.pages, 8192, lambda done, text: progress.append(done))  # type: ignore[arg-type]
    assert measured.context == 128 and [point.batch for point in measured.curve] == [1, 2, 4, 8, 16, 24]
    assert progress == sorted(progress) and progress[-1] < 1
    cost = measured.cost
    assert cost is not None
    for decodes, context, chunk, offset in ((3, 500, 0, 0), (15, 900, 100, 0), (15, 128, 512, 1504), (20, 3000, 40, 320)):
        predicted = cost.seconds(Work(decodes, decodes * context).chunk(offset, chunk))
        assert predicted == pytest.approx(seconds(made_up(backend.pages, decodes, context, chunk, offset)), rel=0.02)


def test_every_batch_size_has_run(backend: Clockwork) -> None:
    warm_up(backend, Limits(24, 2048, "Dynamic", 8), backend.pages, 8192, lambda done, text: None)  # type: ignore[arg-type]
    assert {len(batch.spans) for batch in backend.batches if batch.rows == len(batch.spans)} >= set(range(1, 25))


def test_a_slow_backend_is_spared_and_the_log_says_so(backend: Clockwork, caplog: pytest.LogCaptureFixture) -> None:
    backend.slowness = 100
    with caplog.at_level(logging.INFO):
        measured = warm_up(backend, Limits(24, 2048, "Dynamic", 8), backend.pages, 8192, lambda done, text: None)  # type: ignore[arg-type]
    assert "skipped_from_batch" in caplog.text
    assert max(point.chunk for point in measured.mixed) < 256
    assert backend.now < 60


def test_a_rehearsal_leaves_no_request() -> None:
    for context in (2, 400):
        streams = start(LIMITS, context=context)
        rehearse(streams.engine)
        streams.engine.check_integrity()
        assert not streams.engine.busy and streams.backend.batches


@pytest.mark.parametrize(("permitted", "says"), [(0, "memory_locked=true"), (-1, "memory_locked=false")])
def test_the_log_says_whether_memory_is_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, permitted: int, says: str
) -> None:
    class Libc:
        @staticmethod
        def mlockall(flags: int) -> int:
            return permitted

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *args, **kwargs: Libc)
    with caplog.at_level(logging.INFO):
        assert memory.lock_memory() == (permitted == 0)
    assert says in caplog.text
