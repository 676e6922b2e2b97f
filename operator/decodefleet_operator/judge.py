"""What the conditions say of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodefleet_operator import conditions as c
from decodefleet_operator import placement, sla
from decodefleet_operator.api import Condition, WhenFull, parse_percent
from decodefleet_operator.fleet import Fleet, available
from decodefleet_operator.observation import Observation, PodView
from decodefleet_operator.unsupported import Found

STARTING = ("ContainerCreating", "PodInitializing")  # waiting reasons of a pod that is on its way
DEADLINE = 600.0  # seconds in which a pod of a new revision should become ready


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conditions, and what of them steers the plan."""

    conditions: tuple[Condition, ...]
    moving: bool  # something is about to change: look again soon
    replace_in_place: bool  # no surge pod finds a node and the user allows to go without
    blocked: str | None  # what keeps the wanted count from being reached


def judge(observation: Observation, fleet: Fleet, wanted: int, found: Sequence[Found], now: float) -> Verdict:
    """All conditions of a well-formed resource."""
    spec = observation.resource.spec
    old = [pod for pod in fleet.supply if pod.revision != observation.revision]
    current = [pod for pod in fleet.supply if pod.revision == observation.revision]
    ready = sum(available(pod) for pod in current)
    stuck = placement.waiting_too_long(fleet.supply, now)
    no_surge = bool(old) and any(pod.revision == observation.revision for pod in stuck)
    late = [pod for pod in current if not pod.ready and now - pod.created_at > DEADLINE]
    degraded = _degraded(observation, fleet, found, ready < wanted)
    room = _capacity_available(stuck)
    settled = ready == wanted == len(fleet.supply) and not (fleet.draining or fleet.terminating or fleet.lost or fleet.ended)
    return Verdict(
        (
            _ready(ready, wanted, bool(old), degraded),
            _progressing(observation, ready, wanted, old, no_surge, late, settled, found),
            _sla_met(observation, now),
            metrics_fresh(observation, fleet, now),
            room,
            degraded,
        ),
        moving=not settled,
        replace_in_place=no_surge and spec.rollout.when_full == WhenFull.ReplaceInPlace,
        blocked=f"{room.reason}: {room.message}" if stuck and ready < wanted else None,
    )


def _ready(ready: int, wanted: int, rolling: bool, degraded: Condition) -> Condition:
    text = f"{ready} of {wanted} replicas of the newest revision serve"
    if degraded.status == "True" and degraded.reason == c.UNSUPPORTED and ready < wanted:
        return c.condition(c.READY, False, c.UNSUPPORTED, degraded.message)
    if ready >= wanted:
        return c.condition(c.READY, True, c.ALL_SERVING if wanted else c.SCALED_TO_ZERO, text)
    return c.condition(c.READY, False, c.ROLLING_OUT if rolling else c.PODS_STARTING, text)


def _progressing(
    observation: Observation,
    ready: int,
    wanted: int,
    old: list[PodView],
    no_surge: bool,
    late: list[PodView],
    settled: bool,
    found: Sequence[Found],
) -> Condition:
    if observation.resource.spec.suspend:
        return c.condition(c.PROGRESSING, False, c.SUSPENDED, "spec.suspend is set: decisions are reported and nothing is changed")
    if any(feature.blocking for feature in found):
        return c.condition(c.PROGRESSING, False, c.BLOCKED, "the resource asks for what this version does not have; see Degraded")
    if no_surge:
        return c.condition(
            c.PROGRESSING, False, c.NO_SURGE_CAPACITY, "no node has room for a pod of the new revision beside those of the old one"
        )
    if late:
        minutes = DEADLINE / 60
        return c.condition(
            c.PROGRESSING,
            False,
            c.ROLLOUT_STALLED,
            f"{late[0].name} has not become ready in {minutes:.0f} minutes: {late[0].problem or 'no message'}",
        )
    if old:
        return c.condition(c.PROGRESSING, True, c.ROLLING_OUT, f"{len(old)} pods of older revisions remain")
    if not settled:
        return c.condition(c.PROGRESSING, True, c.SCALING, f"{ready} of {wanted} serve")
    return c.condition(c.PROGRESSING, False, c.STABLE)


def _sla_met(observation: Observation, now: float) -> Condition:
    promised = observation.resource.spec.sla
    if promised is None or not promised.objectives:
        return c.condition(c.SLA_MET, None, c.NO_OBJECTIVES)
    window = sla.window(promised)
    shares = [(o, sla.attainment(observation.ledger, o, window, now).share) for o in promised.objectives]
    missed = [
        f"{o.name} {sla.percent(share)} of {o.target}" for o, share in shares if share is not None and share < parse_percent(o.target)
    ]
    if missed:
        return c.condition(c.SLA_MET, False, c.OBJECTIVE_MISSED, ", ".join(missed))
    if all(share is None for _, share in shares):
        return c.condition(c.SLA_MET, None, c.NO_REQUESTS)
    return c.condition(c.SLA_MET, True, c.OBJECTIVES_MET)


def metrics_fresh(observation: Observation, fleet: Fleet, now: float) -> Condition:
    """Whether every pod that is or was ready answered lately, and the rates are known."""
    ready = [pod for pod in fleet.supply if pod.ready or pod.silent_since is not None]
    silent = [pod.name for pod in ready if pod.silent_since is not None or pod.name not in fleet.loads]
    if not ready:
        return c.condition(c.METRICS_FRESH, None, c.NO_READY_PODS)
    since = min((pod.silent_since for pod in ready if pod.silent_since is not None), default=observation.memory.metrics_lost_since)
    when = f" since {c.timestamp(since)}" if since is not None else ""
    if silent:
        return c.condition(
            c.METRICS_FRESH, False, c.STALE, f"no answer from {len(silent)} of {len(ready)} ready pods{when}, such as {silent[0]}"
        )
    if observation.resource.spec.autoscaling and observation.short is None:
        return c.condition(c.METRICS_FRESH, False, c.STALE, f"rates are not known yet{when}")
    return c.condition(c.METRICS_FRESH, True, c.FRESH)


def _capacity_available(stuck: list[PodView]) -> Condition:
    if not stuck:
        return c.condition(c.CAPACITY_AVAILABLE, True, c.SCHEDULED)
    text = f"{len(stuck)} pods find no node, such as {stuck[0].name}: {stuck[0].problem or 'no message'}; no more are asked for"
    return c.condition(c.CAPACITY_AVAILABLE, False, c.INSUFFICIENT_CAPACITY, text)


def _degraded(observation: Observation, fleet: Fleet, found: Sequence[Found], short_of: bool) -> Condition:
    """What needs a person: the first reason that applies, with the messages of all."""
    causes: list[tuple[str, str]] = [(c.UNSUPPORTED, feature.message) for feature in found]
    causes += observation.warnings
    unwell = [
        pod for pod in fleet.supply if not pod.ready and pod.problem and pod.unschedulable_since is None and pod.problem not in STARTING
    ]
    silent = {pod.name: pod.silent_since for pod in fleet.supply if pod.silent_since is not None}
    unwell = [pod for pod in unwell if pod.name not in silent]
    looping = [pod for pod in unwell if pod.restarts > 0]
    ended = [failure for failure in observation.memory.failures if failure.revision == observation.revision]
    if looping:
        causes.append((c.CRASH_LOOPING, _example(looping)))
    elif len(ended) > 1 and short_of:
        causes.append((c.CRASH_LOOPING, f"{len(ended)} pods ended in the last ten minutes, the last one with: {ended[-1].problem}"))
    elif unwell:
        causes.append((c.POD_FAILING, _example(unwell)))
    for name, since in sorted(silent.items(), key=lambda item: item[1])[:1]:
        more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
        causes.append((c.POD_SILENT, f"{name}{more}: it runs, but has not answered since {c.timestamp(since)}"))
    if not causes:
        return c.condition(c.DEGRADED, False, c.AS_EXPECTED)
    return c.condition(c.DEGRADED, True, causes[0][0], "; ".join(message for _, message in causes))


def _example(pods: list[PodView]) -> str:
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    return f"{pods[0].name}{more}: {pods[0].problem}"
