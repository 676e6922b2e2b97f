"""The events of a plan: what a person should be told, once, when it happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from decodefleet_operator import conditions as c
from decodefleet_operator.autoscale import Decision
from decodefleet_operator.fleet import Fleet
from decodefleet_operator.observation import PodView
from decodefleet_operator.planning import Event


def scaled(decision: Decision) -> Iterator[Event]:
    """The count that pods follow became another one."""
    before = decision.before
    if before is None or before == decision.count:
        return
    reason = c.SCALED_UP if decision.count > before else c.SCALED_DOWN
    why = f": {decision.status.reason}" if decision.status is not None else ": spec.replicas"
    clamped = "; ".join(decision.status.clamped_by) if decision.status is not None else ""
    yield Event("Normal", reason, f"{before} -> {decision.count} replicas{why}{f' ({clamped})' if clamped else ''}"[:1024])


def of_pods(
    create: Sequence[str],
    leave: Sequence[PodView],
    done: Sequence[PodView],
    drop: Sequence[PodView],
    lost: Sequence[PodView],
    fleet: Fleet,
    now: float,
) -> Iterator[Event]:
    """Pods come, drain and go."""
    if create:
        yield Event("Normal", c.CREATING, f"creating {_list(create)}")
    if leave:
        yield Event("Normal", c.DRAINING, f"draining {_names(leave)}")
    for pod in done:
        load = fleet.loads.get(pod.name)
        since = now - (pod.draining_since or now)
        if load is not None and load.running + load.waiting == 0:
            yield Event("Normal", c.DRAINED, f"{pod.name} finished its streams after {since:.0f} s")
        else:
            left = f"{load.running + load.waiting} requests" if load is not None else "an unknown number of requests"
            yield Event("Warning", c.DRAIN_TIMEOUT, f"{pod.name} is deleted after {since:.0f} s of draining with {left} left")
    if drop:
        yield Event("Normal", c.DELETING, f"deleting {_names(drop)}, which never served")
    if lost:
        yield Event("Warning", c.POD_LOST, f"{_names(lost)} cannot be reached any more and is replaced")
    for pod in fleet.ended:
        yield Event("Warning", c.POD_ENDED, f"{pod.name} ended ({pod.phase}): {pod.problem or 'no message'}"[:1024])


def _names(pods: Iterable[PodView]) -> str:
    return _list([pod.name for pod in pods])


def _list(items: Sequence[str]) -> str:
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
