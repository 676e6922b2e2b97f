"""Where new pods go, and whether the cluster has room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from decodefleet_operator.api import Placement
from decodefleet_operator.observation import PodView

PATIENCE = 60.0  # seconds that a pod may be unschedulable before no more are asked for


def waiting_too_long(pods: Iterable[PodView], now: float) -> list[PodView]:
    """Pods that found no node for a minute."""
    return [pod for pod in pods if pod.unschedulable_since is not None and now - pod.unschedulable_since >= PATIENCE]


def choose(placements: Sequence[Placement], pods: Iterable[PodView], full: Iterable[str | None], count: int) -> tuple[str | None, int]:
    """(profile, pods) to create now: the first placement with room that is not full; the next reconcile goes on from there.

    Without placements all pods go to none. (None, 0) where every placement is used up.
    """
    full = set(full)
    if not placements:
        return None, 0 if None in full else count
    used = Counter(pod.placement for pod in pods)
    for placement in placements:
        room = count if placement.max_replicas is None else min(count, placement.max_replicas - used[placement.profile])
        if room > 0 and placement.profile not in full:
            return placement.profile, room
    return None, 0
