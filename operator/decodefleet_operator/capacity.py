"""What one replica can carry: the warm-up's curve, kept per revision, and the point on it at which the objectives still hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from decodefleet.units import parse_duration
from decodefleet_operator.api import Metric, Objective
from decodefleet_operator.observation import CurvePoint, Load, Memory, PodView

LARGEST_MOVE = 0.2  # share by which one new measurement moves a curve: a replica that warms up beside a busy one measures low


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one replica of a revision."""

    curve: tuple[CurvePoint, ...]  # by batch size, at least one
    prefill: float | None  # prompt tokens per second
    measured_at: float


@dataclass(frozen=True, slots=True)
class Operating:
    """Where on its curve a replica should run."""

    point: CurvePoint
    unreachable: tuple[str, ...] = ()  # objectives that hold at no batch size, and so chose nothing


def remember(memory: Memory, pods: Iterable[PodView], loads: Mapping[str, Load], newest: str, now: float) -> Memory:
    """The memory with what newly started agents measured.

    Per revision, the measurement is the median over its present pods; a new agent's moves a known curve by at most 20 % at each point.
    Revisions that no pod runs any more are forgotten.
    """
    by_revision: dict[str, list[Load]] = {}
    present = {newest}
    for pod in pods:
        present.add(pod.revision)
        load = loads.get(pod.name)
        if load is not None and load.curve:
            by_revision.setdefault(pod.revision, []).append(load)
    seen = set(memory.measured)
    kept = {entry[0]: entry for entry in memory.capacity if entry[0] in present}
    measured: list[str] = []
    for revision, answers in by_revision.items():
        measured += (load.instance_id for load in answers)
        if revision in kept and all(load.instance_id in seen for load in answers):
            continue
        before = kept.get(revision)
        rates = [rate for load in answers if (rate := load.prefill_tokens_per_second)]
        prefill = median(rates) if rates else None
        curve = median_curve([load.curve for load in answers])
        if before is not None:
            curve = _moved(before[1], curve)
            prefill = _limited(before[2], prefill)
        if curve:
            kept[revision] = (revision, curve, prefill, now)
    return replace(memory, capacity=tuple(kept.values()), measured=tuple(measured) if measured else memory.measured)


def of_revision(memory: Memory, revision: str) -> Capacity | None:
    """What is known of the newest revision, or of another one that runs while that has not measured itself."""
    known = {entry[0]: Capacity(*entry[1:]) for entry in memory.capacity}
    return known.get(revision) or next(iter(known.values()), None)


def operating_point(capacity: Capacity, objectives: Sequence[Objective], prompt: float | None, output: float | None) -> Operating:
    """The point of the largest throughput at which every latency objective holds.

    With a mean prompt of p and a mean answer of o tokens, a step of s seconds and a prefill rate r:

        TimePerOutputToken   s               within its threshold
        TimeToFirstToken     p / r + s       within its threshold
        RequestDuration      p / r + o · s   within its threshold

    QueueTime and Availability say nothing of a point. Where p, o or r is not known, that term is left out. An objective that holds at no
    point is not bought by smaller batches: it is named and left to the feedback of the error budget.
    """
    prefill = prompt / capacity.prefill if prompt is not None and capacity.prefill else 0.0
    fastest = min(point.step_seconds for point in capacity.curve)
    limit, unreachable = float("inf"), []
    for objective in objectives:
        if objective.threshold is None or objective.metric == Metric.QueueTime:
            continue
        step = parse_duration(objective.threshold)
        if objective.metric == Metric.TimeToFirstToken:
            step -= prefill
        elif objective.metric == Metric.RequestDuration:
            step = (step - prefill) / max(output or 1.0, 1.0)
        if step < fastest:
            unreachable.append(objective.name)
        else:
            limit = min(limit, step)
    within = [point for point in capacity.curve if point.step_seconds <= limit]
    return Operating(max(within, key=lambda point: point.tokens_per_second), tuple(unreachable))


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_curve(curves: Iterable[tuple[CurvePoint, ...]]) -> tuple[CurvePoint, ...]:
    """Point by point over the curves that have it; points without throughput are no measurement."""
    points: dict[int, list[CurvePoint]] = {}
    for curve in curves:
        for point in curve:
            if point.tokens_per_second > 0:
                points.setdefault(point.batch, []).append(point)
    return tuple(
        CurvePoint(batch, median([p.step_seconds for p in same]), median([p.tokens_per_second for p in same]))
        for batch, same in sorted(points.items())
    )


def _moved(before: tuple[CurvePoint, ...], after: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
    old = {point.batch: point for point in before}
    moved = []
    for point in after:
        b = old.get(point.batch, point)
        step = _limited(b.step_seconds, point.step_seconds)
        rate = _limited(b.tokens_per_second, point.tokens_per_second)
        moved.append(CurvePoint(point.batch, step or 0.0, rate or 0.0))
    return tuple(moved) or before


def _limited(before: float | None, after: float | None) -> float | None:
    if before is None or after is None:
        return after if before is None else before
    return min(max(after, before * (1 - LARGEST_MOVE)), before * (1 + LARGEST_MOVE))
