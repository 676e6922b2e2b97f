"""Who leaves, and when a leaving pod may be deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decodefleet_operator.fleet import Fleet, served
from decodefleet_operator.observation import Load, PodView


def victims(pods: Iterable[PodView], count: int, loads: Mapping[str, Load]) -> list[PodView]:
    """The pods to take out, in order: those that never served, then those not ready, then the least work (running + waiting requests), then
    the coldest cache (bytes held by the prefix cache). A pod whose load is not known is the last choice. Ties go to the youngest pod.
    """
    if count <= 0:
        return []
    return sorted(pods, key=lambda pod: order(pod, loads.get(pod.name)))[:count]


def order(pod: PodView, load: Load | None) -> tuple[int, int, int, float, str]:
    """The sort key of `victims`."""
    if not served(pod, load):
        return (0, 0, 0, -pod.created_at, pod.name)
    rank = 1 if not pod.ready else 3 if load is None else 2
    work, cached = (load.running + load.waiting, load.kv_bytes_cached) if load is not None else (0, 0)
    return (rank, work, cached, -pod.created_at, pod.name)


def drained(pod: PodView, load: Load | None, timeout: float, now: float) -> bool:
    """Whether a draining pod may go: its agent takes nothing new and has nothing left, or its time is over.

    `load` must be fresh. One from before the drain began, or of an agent that still takes requests, proves nothing.
    """
    if pod.draining_since is None:
        return False
    if now >= pod.draining_since + timeout:
        return True
    return load is not None and load.state == "DRAINING" and load.running + load.waiting == 0


def to_remind(fleet: Fleet) -> list[PodView]:
    """Draining pods whose agents do not say that they drain: a write or the Drain call was lost."""
    return [pod for pod in fleet.draining if pod.serving or (load := fleet.loads.get(pod.name)) is None or load.state != "DRAINING"]
