"""Service-level objectives of this agent: each request counts once per objective, good or bad, at the threshold of the current epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from decodefleet.v1 import control_pb2 as pb
from decodefleet_agent.messages import Targets

_RECENT = 1024  # measured requests that `observed` is taken over


class Outcome(StrEnum):
    """How a request ended. The last three are bad in every objective."""

    finished = "finished"
    cancelled = "cancelled"
    rejected = "rejected"
    failed = "failed"
    deadline = "deadline"


_BAD = (Outcome.rejected, Outcome.failed, Outcome.deadline)


@dataclass(frozen=True)
class Measured:
    """Seconds of one request; None where it did not come to that. `open_*`: how long it had waited for the next when it ended."""

    duration: float
    queue_time: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None  # None for a single token
    open_time_per_output_token: float | None = None  # of a cancelled stream: the least that its mean could still have become


@dataclass
class _Counted:
    objective: pb.Objective
    epoch: int
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Counters(Protocol):
    """Where the counts are kept: the metrics' registry."""

    def count_objective(self, name: str, good: bool) -> None: ...

    def reset_objective(self, name: str) -> None: ...

    def drop_objective(self, name: str) -> None: ...


class Objectives:
    """What Configure asked for, and the measured values of recent requests."""

    def __init__(self, counters: Counters) -> None:
        self.generation = 0
        self._counters = counters
        self._counted: dict[str, _Counted] = {}

    def configure(self, generation: int, objectives: Iterable[pb.Objective]) -> bool:
        """False, and nothing changes, if the generation is older. What keeps its metric and threshold goes on; the rest starts at zero."""
        if generation < self.generation:
            return False
        self.generation = generation
        wanted = {objective.name: objective for objective in objectives}
        for name in self._counted.keys() - wanted.keys():
            del self._counted[name]
            self._counters.drop_objective(name)
        for name, objective in wanted.items():
            known = self._counted.get(name)
            if known is not None and _same(known.objective, objective):
                known.objective = objective
            else:
                self._counted[name] = _Counted(objective, generation)
                self._counters.reset_objective(name)
        return True

    def count(self, outcome: Outcome, measured: Measured) -> dict[str, bool]:
        """Counts one request; good or bad by objective, without those that it says nothing about."""
        verdicts: dict[str, bool] = {}
        for name, counted in self._counted.items():
            value = _value(counted.objective, measured)
            if value is not None:
                counted.recent.append(value)
            verdict = _judge(counted.objective, outcome, measured, value)
            if verdict is not None:
                self._counters.count_objective(name, verdict)
                verdicts[name] = verdict
        return verdicts

    def describe(self, counts: Callable[[str], tuple[int, int]]) -> list[pb.ObjectiveCount]:
        """For GetLoad; `counts` gives (good, total) of a name."""
        described = []
        for name, counted in self._counted.items():
            good, total = counts(name)
            described.append(
                pb.ObjectiveCount(
                    name=name,
                    good=good,
                    total=total,
                    threshold_seconds=counted.objective.threshold_seconds,
                    epoch=counted.epoch,
                    observed_seconds=quantile(list(counted.recent), counted.objective.target),
                )
            )
        return described


def targets(objectives: Iterable[pb.Objective]) -> Targets:
    """What the engine has to keep: the strictest threshold of each latency that it decides."""

    def strictest(metric: pb.Objective.Metric) -> float | None:
        return min((o.threshold_seconds for o in given if o.metric == metric), default=None)

    given = list(objectives)
    return Targets(strictest(pb.Objective.TIME_PER_OUTPUT_TOKEN), strictest(pb.Objective.TIME_TO_FIRST_TOKEN))


def quantile(values: list[float], share: float) -> float | None:
    """Linear interpolation between order statistics, as numpy's default; None of nothing."""
    if not values:
        return None
    values = sorted(values)
    position = share * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def _same(one: pb.Objective, other: pb.Objective) -> bool:
    return (one.metric, one.threshold_seconds) == (other.metric, other.threshold_seconds)


def _value(objective: pb.Objective, measured: Measured) -> float | None:
    match objective.metric:
        case pb.Objective.TIME_TO_FIRST_TOKEN:
            return measured.time_to_first_token
        case pb.Objective.TIME_PER_OUTPUT_TOKEN:
            return measured.time_per_output_token
        case pb.Objective.REQUEST_DURATION:
            return measured.duration
        case pb.Objective.QUEUE_TIME:
            return measured.queue_time
    return None


def _judge(objective: pb.Objective, outcome: Outcome, measured: Measured, value: float | None) -> bool | None:
    if outcome in _BAD:
        return False
    if objective.metric == pb.Objective.AVAILABILITY:
        return True if outcome is Outcome.finished else None
    threshold = objective.threshold_seconds
    if outcome is Outcome.finished:
        return None if value is None else value <= threshold
    return _judge_cancelled(objective, measured, threshold)


def _judge_cancelled(objective: pb.Objective, measured: Measured, threshold: float) -> bool | None:
    """What was decided when the client left counts; what was not, only if it had run past the threshold already."""
    match objective.metric:
        case pb.Objective.TIME_TO_FIRST_TOKEN if measured.time_to_first_token is not None:
            return measured.time_to_first_token <= threshold
        case pb.Objective.QUEUE_TIME if measured.queue_time is not None:
            return measured.queue_time <= threshold
        case pb.Objective.TIME_PER_OUTPUT_TOKEN:
            open_value = measured.open_time_per_output_token
            return False if open_value is not None and open_value > threshold else None
    return False if measured.duration > threshold else None
