"""The pods of a fleet by what they are to a decision: supply, draining, terminating, lost or ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decodefleet_operator.observation import Load, Observation, PodView


@dataclass(frozen=True, slots=True)
class Fleet:
    """Each pod is in exactly one of the first five."""

    supply: tuple[PodView, ...]  # serves, will serve, or waits for a node
    draining: tuple[PodView, ...]  # finishes its streams; not being deleted yet
    terminating: tuple[PodView, ...]  # has a deletionTimestamp
    lost: tuple[PodView, ...]  # its node is gone; being deleted or not
    ended: tuple[PodView, ...]  # Succeeded or Failed; not being deleted yet
    loads: Mapping[str, Load]  # by pod name; only those young enough to be believed

    @property
    def held(self) -> int:
        """Pods that hold, or may hold, a place in the cluster, those aside that are ending already."""
        return len(self.supply) + len(self.draining) + len(self.lost)


def classify(observation: Observation, now: float) -> Fleet:
    """The fleet at a time."""
    groups: dict[str, list[PodView]] = {"supply": [], "draining": [], "terminating": [], "lost": [], "ended": []}
    for pod in observation.pods:
        groups[_group(pod)].append(pod)
    age = observation.max_load_age
    loads = {name: load for name, load in observation.loads.items() if -age <= now - load.at <= age}
    return Fleet(**{name: tuple(pods) for name, pods in groups.items()}, loads=loads)


def available(pod: PodView) -> bool:
    """Clients reach it: it is ready and carries the serving label."""
    return pod.ready and pod.serving


def served(pod: PodView, load: Load | None) -> bool:
    """Whether it may have streams: it must be drained before it is deleted."""
    return pod.serving or pod.ready or pod.ready_at is not None or (load is not None and load.running + load.waiting > 0)


def _group(pod: PodView) -> str:
    if pod.lost:
        return "lost"
    if pod.deleted_at is not None:
        return "terminating"
    if pod.phase in ("Succeeded", "Failed"):
        return "ended"
    return "supply" if pod.draining_since is None else "draining"
