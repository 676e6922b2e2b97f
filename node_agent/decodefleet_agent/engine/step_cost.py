"""How long a step takes: fitted to what warm-up measured, and corrected by the steps that follow."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace

from decodefleet_agent.messages import CurvePoint, MixedPoint

_GAIN = 0.1  # share of an observed deviation that one step corrects
_MOST_ATTENTION = 0.8
_FARTHEST = 8.0  # the corrections stay within 1/8 … 8

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Work:
    """What one step computes, as far as its time depends on it."""

    decodes: int = 0  # rows of decoding sequences
    context: int = 0  # tokens that these attend to, summed
    prefill: int = 0  # rows of prompts
    pairs: int = 0  # (row, token) pairs in the attention of these

    def chunk(self, start: int, length: int) -> Work:
        """With one more chunk of a prompt, which follows `start` tokens."""
        return replace(self, prefill=self.prefill + length, pairs=self.pairs + chunk_pairs(start, length))


def chunk_pairs(start: int, length: int) -> int:
    """(row, token) pairs in the attention of a chunk that follows `start` tokens: each row sees those before it, and itself."""
    return length * start + length * (length + 1) // 2


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: those of its decoding rows, plus what its prompt rows add.

    `decode`: (rows, seconds), each row attending to `context` tokens. `prefill`: (rows, added seconds) without their attention.
    Both rise, and are straight between points. Beyond its last point the latter is proportional to the rows.
    """

    decode: Points
    context: int
    prefill: Points
    per_token: float = 0.0  # seconds for a token that a decoding row attends to
    per_pair: float = 0.0  # seconds for a (row, token) pair of a prompt's attention
    decode_factor: float = 1.0
    prefill_factor: float = 1.0

    def plain(self, decodes: int, context: float) -> float:
        """Seconds of a step without prompts; `context`: tokens that its rows attend to, summed."""
        least = self.decode[0][1] / 2
        return self.decode_factor * max(least, _at(self.decode, decodes) + self.per_token * (context - decodes * self.context))

    def added(self, prefill: int, pairs: int) -> float:
        """Seconds that prompt rows add."""
        last = self.prefill[-1][0] if self.prefill else 1
        rows = _at(((0, 0.0), *self.prefill), min(prefill, last)) * max(1.0, prefill / last)
        return self.prefill_factor * (rows + self.per_pair * pairs)

    def seconds(self, work: Work) -> float:
        return self.plain(work.decodes, work.context) + self.added(work.prefill, work.pairs)

    def corrected(self, work: Work, seconds: float) -> StepCost:
        """Moved towards what a step took. A step without decoding rows says nothing about what neighbours wait for."""
        plain, added = self.plain(work.decodes, work.context), self.added(work.prefill, work.pairs)
        if not work.decodes:
            return self
        if not work.prefill:
            return replace(self, decode_factor=_moved(self.decode_factor, seconds / plain, _GAIN))
        if added <= 0:
            return self
        # Where prompts are a small part of the step, what is left after subtraction is mostly noise.
        gain = _GAIN * added / (plain + added)
        return replace(self, prefill_factor=_moved(self.prefill_factor, (seconds - plain) / added, gain))


def fit(curve: Iterable[CurvePoint], mixed: Iterable[MixedPoint], context: int) -> StepCost | None:
    """The cost that explains the measured points; None where no mixed step was measured.

    `curve`: decode steps at `context`. `mixed`: each adds a chunk to a batch of the curve, or is the batch itself at a longer context.
    """
    decode = _rising((point.batch, point.step_seconds) for point in curve)
    points = list(mixed)
    chunks = [point for point in points if point.chunk]
    if not decode or not chunks:
        return None
    longer = [point for point in points if not point.chunk and point.context > context]
    per_token = _mean((p.step_seconds - _at(decode, p.batch)) / (p.batch * (p.context - context)) for p in longer)
    added = {(p.batch, p.chunk, p.start): p.step_seconds - _at(decode, p.batch) for p in chunks}
    own = {size: _mean(s for (_, chunk, start), s in added.items() if chunk == size and not start) for _, size, _ in added}
    per_pair = _mean(
        (seconds - added[batch, chunk, 0]) / (chunk * start)
        for (batch, chunk, start), seconds in added.items()
        if start and (batch, chunk, 0) in added
    )
    # A difference of two steps is noisy; attention cannot be more than most of a chunk that attends to itself alone.
    per_pair = min(per_pair, *(_MOST_ATTENTION * seconds / chunk_pairs(0, size) for size, seconds in own.items()))
    prefill = _rising((size, seconds - per_pair * chunk_pairs(0, size)) for size, seconds in own.items())
    return StepCost(decode, context, prefill, per_token, per_pair)


def _at(points: Points, x: float) -> float:
    """Straight between points, and on from the last two; the first holds below itself."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    index = min(bisect.bisect_left(points, x, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _rising(points: Iterable[tuple[int, float]]) -> Points:
    """In order, none below one before it: noise must not make more work look cheaper."""
    rising: list[tuple[int, float]] = []
    for x, y in sorted(points):
        rising.append((x, max(y, rising[-1][1] if rising else 0.0)))
    return tuple(rising)


def _mean(values: Iterable[float]) -> float:
    """At least 0; 0 of nothing."""
    given = list(values)
    return max(0.0, sum(given) / len(given)) if given else 0.0


def _moved(factor: float, ratio: float, gain: float) -> float:
    step = min(max(ratio, 0.5), 2.0) ** gain
    return min(max(factor * step, 1 / _FARTHEST), _FARTHEST)
