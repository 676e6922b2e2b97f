"""How many pods to create and which to take out, so that the fleet reaches a count of pods of one revision.

Outside a rollout the count alone decides. In a rollout, with N wanted, S = maxSurge and U = maxUnavailable:

    create  up to N of the new revision while all that hold a place, leaving ones included, are at most N + S
    remove  old pods that never served, at once;
            old pods that serve, while at least N - U pods of any revision serve without them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decodefleet_operator.api import Rollout
from decodefleet_operator.drain import order, victims
from decodefleet_operator.fleet import Fleet, available, served
from decodefleet_operator.observation import Load, PodView


@dataclass(frozen=True, slots=True)
class Moves:
    """What brings the fleet nearer to the wanted count."""

    create: int
    remove: tuple[PodView, ...]


def moves(fleet: Fleet, revision: str, wanted: int, limit: int, rollout: Rollout, in_place: bool) -> Moves:
    """`limit` is the most replicas that the fleet may ever want (maxReplicas); lost and draining pods are replaced up to limit + maxSurge.

    `in_place`: no surge pod can be scheduled and the user allows to go below `wanted` by one for it.
    """
    current = [pod for pod in fleet.supply if pod.revision == revision]
    old = [pod for pod in fleet.supply if pod.revision != revision]
    if not old:
        room = min(wanted - len(current), max(limit, wanted) + rollout.max_surge - fleet.held)
        return Moves(max(0, room), tuple(victims(current, len(current) - wanted, fleet.loads)))
    create = max(0, min(wanted - len(current), wanted + rollout.max_surge - fleet.held))
    floor = wanted - max(rollout.max_unavailable, 1 if in_place else 0)
    return Moves(create, tuple(_old_victims(current, old, floor, fleet.loads)))


def _old_victims(current: list[PodView], old: list[PodView], floor: int, loads: Mapping[str, Load]) -> list[PodView]:
    """Old pods that may leave while `floor` pods remain available.

    A serving pod that is not ready just now may be back in a moment: it counts until a new one stands in for it, and then goes first.
    """
    idle = [pod for pod in old if not served(pod, loads.get(pod.name))]
    busy = [pod for pod in old if served(pod, loads.get(pod.name))]
    removable = len(busy) + sum(available(pod) for pod in current) - floor
    return idle + sorted(busy, key=lambda pod: (available(pod), order(pod, loads.get(pod.name))))[: max(0, removable)]
