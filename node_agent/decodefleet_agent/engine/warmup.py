"""Warm-up: runs what serving will run, measures how long steps take, and pins the memory that they touched."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from decodefleet_agent.engine.backends.base import Backend, Progress
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.controllers.base import Limits
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, pages_for
from decodefleet_agent.engine.step_cost import StepCost, fit
from decodefleet_agent.messages import CurvePoint, MixedPoint, Sampling, Submit

log = logging.getLogger(__name__)

_CONTEXT = 128  # tokens that the sequences of the curve attend to
_LONG = 1024  # and those of the points that show what attention costs
_PREFILL_TOKENS = 128
_BESIDE = 16  # decoding sequences beside a chunk, at most
_CHUNKS = (16, 64, 256, 1024)
_SLOW = 0.25  # seconds of a chunk after which no longer one is measured
_STEPS = 3  # measured steps of each point, after one that is not
_SECONDS = 0.5  # a point that has taken this long is not measured again
_OTHER_SIZES = 1.0  # seconds that the batch sizes between the measured ones may take together


@dataclass(frozen=True)
class Measured:
    """`curve`: decode steps, each sequence attending to `context` tokens. `mixed`: chunks beside some of them, and longer contexts."""

    prefill_tokens_per_second: float
    curve: list[CurvePoint]
    context: int
    mixed: list[MixedPoint]

    @property
    def cost(self) -> StepCost | None:
        return fit(self.curve, self.mixed, self.context)


def warm_up(backend: Backend, limits: Limits, pages: int, context_length: int, progress: Progress) -> Measured:
    """Runs made-up batches in the pool's memory, which nobody holds yet: the page bookkeeping and the prefix cache never see them."""
    prompt = min(_PREFILL_TOKENS, limits.max_batch_tokens, context_length, pages * PAGE_TOKENS)
    sizes = batch_sizes(min(limits.most_running, pages))
    longest = min(context_length, (pages - sizes[-1] + 1) * PAGE_TOKENS)
    context = min(_CONTEXT, longest)
    progress(0.0, f"prefill of {prompt} tokens")
    prefill = _timed(backend, made_up(pages, 0, 0, prompt))
    curve = []
    for index, size in enumerate(sizes):
        progress(0.1 + 0.4 * index / len(sizes), f"batch of {size}")
        seconds = _timed(backend, made_up(pages, size, context))
        curve.append(CurvePoint(size, seconds, size / seconds))
    mixed: list[MixedPoint] = []
    for point in _mixed(backend, limits, pages, context_length, context, sizes):
        progress(min(0.9, 0.5 + 0.05 * len(mixed)), f"batch of {point.batch} beside a prompt")
        mixed.append(point)
    progress(0.95, "the other batch sizes")
    _run_others(backend, (made_up(pages, size, context) for size in range(1, sizes[-1]) if size not in sizes))
    return Measured(prompt / prefill, curve, context, mixed)


def rehearse(engine: Engine) -> None:
    """Takes made-up requests through the whole loop: schedule, sampling and all that Python does for the first time."""
    room = max(1, engine.context_length - 2)
    sampling = Sampling(seed=0, temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, max_tokens=2, logprobs=1)
    plain = Sampling(seed=0, max_tokens=2)
    engine.handle([Submit(1, [0] * min(32, room), sampling), Submit(2, [0] * min(32, room), plain)])
    while engine.busy:
        engine.step()


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, … and the largest itself."""
    sizes = [1]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def made_up(pages: int, decodes: int, context: int, chunk: int = 0, start: int = 0) -> Batch:
    """`decodes` sequences that decode at `context`, and a chunk of a prompt that follows `start` tokens, a multiple of 16.

    Each row is written to a page that no other sequence reads; what is read is spread over the rest of the pool.
    """
    written = decodes + pages_for(chunk)
    read = range(written, pages)

    def pages_before(tokens: int, sequence: int) -> tuple[int, ...]:
        wanted = tokens // PAGE_TOKENS
        return tuple(read[(sequence * wanted + index) % len(read)] for index in range(wanted))

    spans = [
        Span(number, (*pages_before(context - 1, number), number), context - 1, 1, samples=True) for number in range(decodes)
    ]
    if chunk:
        spans.append(Span(decodes, (*pages_before(start, decodes), *range(decodes, written)), start, chunk, samples=True))
    return Batch(np.zeros(decodes + chunk, np.int64), tuple(spans))


def _mixed(
    backend: Backend, limits: Limits, pages: int, context_length: int, context: int, sizes: list[int]
) -> Iterator[MixedPoint]:
    """Chunks beside one sequence and beside several, at the beginning of a prompt and later; and several at a longer context."""
    several = max((size for size in sizes if size <= min(_BESIDE, limits.max_batch_tokens // 2)), default=1)
    spare = pages - several - pages_for(context) + 1
    room = min(limits.max_batch_tokens - several, context_length, spare * PAGE_TOKENS)
    if room < 1:
        return

    def point(batch: int, context: int, chunk: int, start: int) -> MixedPoint:
        return MixedPoint(batch, context, chunk, start, _timed(backend, made_up(pages, batch, context, chunk, start)))

    chunks = sorted({min(chunk, room) for chunk in _CHUNKS})
    for batch in sorted({1, several}):
        for chunk in chunks:
            measured = point(batch, context, chunk, 0)
            yield measured
            if measured.step_seconds > _SLOW:
                break
    chunk = next((chunk for chunk in reversed(chunks) if chunk <= 64), chunks[0])
    long = min(_LONG, context_length - chunk, (pages - several - pages_for(chunk)) * PAGE_TOKENS) // PAGE_TOKENS * PAGE_TOKENS
    if long >= 2 * context:
        yield point(several, context, chunk, long)
        yield point(several, long, 0, 0)


def _run_others(backend: Backend, batches: Iterable[Batch]) -> None:
    """Once each, so that nothing is done for the first time while serving; a slow backend is spared the rest."""
    started = time.monotonic()
    for batch in batches:
        if time.monotonic() - started > _OTHER_SIZES:
            log.info("warm_up skipped_from_batch=%d", len(batch.spans))
            return
        backend.step(batch)


def _timed(backend: Backend, batch: Batch) -> float:
    """Seconds of one step: the median of those measured."""
    started = time.monotonic()
    backend.step(batch)
    times: list[float] = []
    while len(times) < _STEPS and (not times or time.monotonic() - started < _SECONDS):
        begun = time.monotonic()
        backend.step(batch)
        times.append(time.monotonic() - begun)
    return median(times)
