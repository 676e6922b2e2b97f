"""The limits on a replica count, in the order in which they act, and what they remember.

    metrics         never shrink on what is not known
    stabilization   grow to the least, shrink to the most that was computed throughout a time
    rate            pods per minute, up and down
    foreign floor   a count that somebody else wrote holds for one scale-down stabilisation time
    min, max        the user's range
    budget          what maxPerHour pays for; never below min

Each that changes the count is named in status.autoscaling.clampedBy. Histories of counts are step functions: an entry holds until the
next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from decodefleet.units import parse_duration
from decodefleet_operator.api import Autoscaling
from decodefleet_operator.cost import affordable
from decodefleet_operator.observation import Memory, Observation, ReplicasWriter

Steps = tuple[tuple[float, int], ...]

MINUTE = 60.0
MOST_STEPS = 512


class Draft(Protocol):
    """A count in the making; see autoscale.Draft."""

    count: int
    inputs: dict[str, str]
    may_shrink: bool

    def clamp(self, count: int, name: str) -> None: ...


def limit(draft: Draft, observation: Observation, policy: Autoscaling, memory: Memory, current: int, now: float) -> Memory:
    """Applies every limit to the draft; returns the memory with its recommendation."""
    spec = observation.resource.spec
    if not draft.may_shrink and draft.count < current:
        draft.clamp(current, "metrics")
    recommended = draft.count
    _stabilise(draft, policy, memory, current, now)
    _rate(draft, policy, memory, current, now)
    _floor(draft, policy, memory, now)
    low, high = max(1, policy.min_replicas), policy.max_replicas
    draft.clamp(max(draft.count, low), f"minReplicas {low}")
    draft.clamp(min(draft.count, high), f"maxReplicas {high}")
    if spec.cost is not None and spec.cost.max_per_hour is not None:
        _budget(draft, observation, spec.cost.max_per_hour, low)
    longest = max(parse_duration(policy.scale_up.stabilization), parse_duration(policy.scale_down.stabilization))
    return replace(memory, recommendations=added(memory.recommendations, recommended, longest, now))


def follow(memory: Memory, count: int, now: float) -> Memory:
    """The memory with the count that pods follow from now on."""
    return replace(memory, decisions=added(memory.decisions, count, MINUTE, now))


def stood_since(memory: Memory, now: float) -> float:
    """When the count that pods follow last changed."""
    return memory.decisions[-1][0] if memory.decisions else now


def until_now(memory: Memory, now: float) -> Memory:
    """The memory as a clock that went back may use it: nothing in it is later than now."""
    foreign = memory.foreign_replicas
    return replace(
        memory,
        since=min(memory.since, now),
        recommendations=_past(memory.recommendations, now),
        decisions=_past(memory.decisions, now),
        foreign_replicas=(min(foreign[0], now), *foreign[1:]) if foreign is not None else None,
        metrics_lost_since=min(memory.metrics_lost_since, now) if memory.metrics_lost_since is not None else None,
    )


def note_writer(memory: Memory, writer: ReplicasWriter | None, replicas: int, now: float) -> Memory:
    """The memory with the last write to spec.replicas that was somebody else's and changed the count."""
    if writer is None or writer.ours:
        return memory
    before = memory.foreign_replicas
    at = now if writer.at is None else min(writer.at, now)
    same = before is not None and before[1:] == (replicas, writer.manager) and (writer.at is None or at <= before[0] + 1.0)
    if same or (memory.decisions and memory.decisions[-1][1] == replicas):
        return memory
    return replace(memory, foreign_replicas=(at, replicas, writer.manager))


def added(steps: Steps, count: int, keep: float, now: float) -> Steps:
    """The steps with the count from now on, without what was over `keep` seconds ago."""
    steps = steps if steps and steps[-1][1] == count else (*steps, (now, count))
    while len(steps) > 1 and steps[1][0] <= now - keep:
        steps = steps[1:]
    while len(steps) > MOST_STEPS:
        steps = ((steps[0][0], max(steps[0][1], steps[1][1])), *steps[2:])
    return steps


def within(steps: Steps, seconds: float, now: float) -> list[int]:
    """The counts that held at any time in the last `seconds`, the present one included."""
    ended = sum(end <= now - seconds for end, _ in steps[1:])
    return [count for _, count in steps[ended:]]


def _past(steps: Steps, now: float) -> Steps:
    return steps if not steps or steps[-1][0] <= now else tuple((min(at, now), count) for at, count in steps)


def _stabilise(draft: Draft, policy: Autoscaling, memory: Memory, current: int, now: float) -> None:
    up, down = parse_duration(policy.scale_up.stabilization), parse_duration(policy.scale_down.stabilization)
    if draft.count > current and up > 0:
        young = current if now - memory.since < up else draft.count
        draft.clamp(max(current, min([draft.count, young, *within(memory.recommendations, up, now)])), "scaleUp.stabilization")
    elif draft.count < current and down > 0:
        young = current if now - memory.since < down else draft.count
        draft.clamp(min(current, max([draft.count, young, *within(memory.recommendations, down, now)])), "scaleDown.stabilization")


def _rate(draft: Draft, policy: Autoscaling, memory: Memory, current: int, now: float) -> None:
    lately = [current, *within(memory.decisions, MINUTE, now)]
    most = max(current, min(lately) + policy.scale_up.max_pods_per_minute)
    least = min(current, max(lately) - policy.scale_down.max_pods_per_minute)
    draft.clamp(min(draft.count, most), "scaleUp.maxPodsPerMinute")
    draft.clamp(max(draft.count, least), "scaleDown.maxPodsPerMinute")


def _floor(draft: Draft, policy: Autoscaling, memory: Memory, now: float) -> None:
    if memory.foreign_replicas is None:
        return
    at, count, manager = memory.foreign_replicas
    if now - at < parse_duration(policy.scale_down.stabilization):
        draft.clamp(max(draft.count, count), f"spec.replicas written by {manager}")


def _budget(draft: Draft, observation: Observation, budget: float, low: int) -> None:
    most = affordable(observation.resource.spec.resources.placements, budget)
    if most is None:
        draft.inputs["budget"] = "not applied: a price is not known"
        return
    draft.inputs["affordable"] = str(most)
    draft.clamp(min(draft.count, max(low, most)), "cost.maxPerHour")


def deadlines(policy: Autoscaling, memory: Memory) -> Iterable[float]:
    """Times at which a limit ends by itself."""
    down = parse_duration(policy.scale_down.stabilization)
    yield memory.since + down
    if memory.foreign_replicas is not None:
        yield memory.foreign_replicas[0] + down
    for at, _ in memory.recommendations[1:2]:
        yield at + down
