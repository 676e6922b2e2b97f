"""The decision: one pure function from what is observed to what should be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from decodefleet_operator import conditions as c
from decodefleet_operator import drain, judge, placement, rollout, sla, status
from decodefleet_operator.api import Spec, Status
from decodefleet_operator.fleet import Fleet, classify, served
from decodefleet_operator.observation import Observation, PodView
from decodefleet_operator.planning import Event, Plan, PodRef, RuntimeConfig
from decodefleet_operator.unsupported import unsupported


def plan(observation: Observation, now: float) -> Plan:
    """What to write now, and when to look again. Pure: the same observation and time give the same plan."""
    fleet = classify(observation, now)
    if observation.error is not None:
        return _refused(observation, fleet, now)
    resource, spec = observation.resource, observation.resource.spec
    found = unsupported(spec)
    frozen = spec.suspend or any(feature.blocking for feature in found)
    objectives = spec.sla.objectives if spec.sla else []
    ledger = sla.advance(observation.ledger, objectives, observation.pods, observation.loads, spec.drain_timeout, now)
    observation = replace(observation, ledger=ledger)

    wanted = spec.replicas
    verdict = judge.judge(observation, fleet, wanted, found, now)
    draft = Plan(
        status=status.build(observation, fleet, verdict.conditions, None, None, now),
        ledger=ledger,
        memory=observation.memory,
        revisit_after=1.0 if verdict.moving else 10.0,
    )
    if frozen:
        return draft

    config = RuntimeConfig(resource.metadata.generation, tuple(objectives), spec.engine.batching.max_waiting, spec.drain_timeout)
    moves = rollout.moves(fleet, observation.revision, wanted, _limit(spec, wanted), spec.rollout, verdict.replace_in_place)
    stuck = placement.waiting_too_long(fleet.supply, now)
    profile, room = placement.choose(spec.resources.placements, observation.pods, (pod.placement for pod in stuck), moves.create)
    create = names(resource.metadata.name, observation.revision, observation.pods, min(room, moves.create))
    gone = [pod for pod in fleet.draining if drain.drained(pod, fleet.loads.get(pod.name), spec.drain_timeout, now)]
    leave = [pod for pod in moves.remove if served(pod, fleet.loads.get(pod.name))]
    drop = [pod for pod in moves.remove if not served(pod, fleet.loads.get(pod.name))]
    lost = [pod for pod in fleet.lost if pod.deleted_at is None]
    going = {pod.name for pod in gone}
    remind = [pod for pod in drain.to_remind(fleet) if pod.name not in going]
    removed = {pod.name for pod in moves.remove}
    staying = [pod for pod in fleet.supply if pod.name not in removed]
    return replace(
        draft,
        create=create,
        placement=profile,
        configure=_refs(pod for pod in staying if _generation(fleet, pod, below=config.generation)),
        config=config,
        serve=_refs(pod for pod in staying if _may_serve(fleet, pod, config.generation)),
        drain=_refs((*leave, *remind)),
        delete=_refs((*gone, *fleet.ended, *drop, *lost)),
        events=tuple(_events(create, leave, gone, drop, fleet, now)),
    )


def names(name: str, revision: str, pods: Iterable[PodView], count: int) -> tuple[str, ...]:
    """`<name>-<revision>-<n>` with the lowest numbers that no pod object holds."""
    taken = {pod.name for pod in pods}
    chosen: list[str] = []
    n = 0
    while len(chosen) < count:
        if (candidate := f"{name}-{revision}-{n}") not in taken:
            chosen.append(candidate)
        n += 1
    return tuple(chosen)


def _limit(spec: Spec, wanted: int) -> int:
    return spec.autoscaling.max_replicas if spec.autoscaling else wanted


def _generation(fleet: Fleet, pod: PodView, below: int) -> bool:
    load = fleet.loads.get(pod.name)
    return load is not None and load.generation < below


def _may_serve(fleet: Fleet, pod: PodView, generation: int) -> bool:
    load = fleet.loads.get(pod.name)
    return pod.ready and not pod.serving and load is not None and load.state == "SERVING" and load.generation >= generation


def _refs(pods: Iterable[PodView]) -> tuple[PodRef, ...]:
    return tuple(PodRef(pod.name, pod.uid, pod.resource_version) for pod in pods)


def _refused(observation: Observation, fleet: Fleet, now: float) -> Plan:
    """The resource is malformed: say so, and touch nothing."""
    resource = observation.resource
    before = resource.status or Status()
    kept = [x for x in before.conditions if x.type not in (c.READY, c.DEGRADED)]
    verdict = [
        c.condition(c.READY, False, c.INVALID_SPEC, "the resource cannot be read; see Degraded"),
        *kept,
        c.condition(c.DEGRADED, True, c.INVALID_SPEC, observation.error or ""),
    ]
    stamped = c.stamped(verdict, before.conditions, resource.metadata.generation, now)
    shown = before.model_copy(update={**status.counts(observation, fleet), "conditions": stamped})
    return Plan(status=shown, ledger=observation.ledger, memory=observation.memory)


def _events(
    create: tuple[str, ...], leave: list[PodView], gone: list[PodView], drop: list[PodView], fleet: Fleet, now: float
) -> Iterable[Event]:
    if create:
        yield Event("Normal", c.CREATING, f"creating {_list(create)}")
    if leave:
        yield Event("Normal", c.DRAINING, f"draining {_list(pod.name for pod in leave)}")
    for pod in gone:
        load = fleet.loads.get(pod.name)
        since = now - (pod.draining_since or now)
        if load is not None and load.running + load.waiting == 0:
            yield Event("Normal", c.DRAINED, f"{pod.name} finished its streams after {since:.0f} s")
        else:
            left = f"{load.running + load.waiting} requests" if load is not None else "an unknown number of requests"
            yield Event("Warning", c.DRAIN_TIMEOUT, f"{pod.name} is deleted after {since:.0f} s of draining with {left} left")
    if drop:
        yield Event("Normal", c.DELETING, f"deleting {_list(pod.name for pod in drop)}, which never served")
    for pod in fleet.ended:
        yield Event("Warning", c.POD_ENDED, f"{pod.name} ended ({pod.phase}): {pod.problem or 'no message'}"[:1024])


def _list(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
