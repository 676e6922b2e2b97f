"""Warm-up: runs each batch size before serving, and measures what the engine can do."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from decodefleet_agent.engine.backends.base import Backend, Progress
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import pages_for
from decodefleet_agent.engine.scheduler import Limits
from decodefleet_agent.messages import CurvePoint

_PREFILL_TOKENS = 128
_STEPS = 2  # measured steps of each point, after the first, which is not measured
_SECONDS = 1.0  # a point that has taken this long is measured once


@dataclass(frozen=True)
class Measured:
    prefill_tokens_per_second: float
    curve: list[CurvePoint]


def warm_up(backend: Backend, limits: Limits, pages: int, context_length: int, progress: Progress) -> Measured:
    """Runs made-up batches in the pool's memory, which nobody holds yet: the page bookkeeping and the prefix cache never see them."""
    prompt = min(_PREFILL_TOKENS, limits.max_batch_tokens, context_length, pages * 16)
    sizes = batch_sizes(min(limits.max_batch, limits.max_batch_tokens, pages))
    progress(0.0, f"prefill of {prompt} tokens")
    tokens = np.zeros(prompt, np.int64)
    seconds = _timed(backend, Batch(tokens, (Span(0, tuple(range(pages_for(prompt))), 0, prompt, samples=True),)))
    curve = []
    for index, size in enumerate(sizes):
        progress((index + 1) / (len(sizes) + 1), f"batch of {size}")
        spans = tuple(Span(number, (number,), 0, 1, samples=True) for number in range(size))
        step = _timed(backend, Batch(np.zeros(size, np.int64), spans))
        curve.append(CurvePoint(size, step, size / step))
    return Measured(prompt / seconds, curve)


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, … and the largest itself."""
    sizes = [1]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def _timed(backend: Backend, batch: Batch) -> float:
    """Seconds of one step: the shortest of those measured."""
    started = time.monotonic()
    backend.step(batch)
    times: list[float] = []
    while len(times) < _STEPS and (not times or time.monotonic() - started < _SECONDS):
        begun = time.monotonic()
        backend.step(batch)
        times.append(time.monotonic() - begun)
    return min(times)
