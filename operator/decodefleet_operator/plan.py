"""The decision: one pure function from what is observed to what should be written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from decodefleet_operator import autoscale, backoff, capacity, clamps, drain, events, judge, placement, rollout, sla, status
from decodefleet_operator import conditions as c
from decodefleet_operator.api import Autoscaling, AutoscalingStatus, Status
from decodefleet_operator.fleet import Fleet, classify, served
from decodefleet_operator.observation import Memory, Observation, PodView
from decodefleet_operator.planning import Plan, PodRef, RuntimeConfig
from decodefleet_operator.unsupported import unsupported

SOONEST, LATEST = 0.5, 10.0  # seconds until the next look


def plan(observation: Observation, now: float) -> Plan:
    """What to write now, and when to look again. Pure: the same observation and time give the same plan."""
    fleet = classify(observation, now)
    if observation.error is not None:
        return _refused(observation, fleet, now)
    spec = observation.resource.spec
    found = unsupported(spec, observation.gpu_profiles)
    frozen = spec.suspend or any(feature.blocking for feature in found)
    objectives = spec.sla.objectives if spec.sla else []
    ledger = sla.advance(observation.ledger, objectives, observation.pods, observation.loads, spec.drain_timeout, now)
    observation = replace(observation, ledger=ledger, memory=_remembered(observation, fleet, now))

    decision = autoscale.decide(observation, fleet, frozen, now)
    verdict = judge.judge(observation, fleet, decision.count, found, now)
    blocked = "spec.suspend" if spec.suspend else next((feature.message for feature in found if feature.blocking), verdict.blocked)
    draft = Plan(
        status=status.build(observation, fleet, verdict.conditions, _with_block(decision.status, blocked), decision, now),
        ledger=ledger,
        memory=decision.memory,
        replicas=decision.count if decision.status is not None and decision.count != spec.replicas else None,
        events=tuple(events.scaled(decision)),
    )
    if not frozen:
        draft = _pods(draft, observation, fleet, decision.count, verdict.replace_in_place, now)
    return replace(draft, revisit_after=_revisit(draft, observation, fleet, verdict.moving and not frozen, decision.count, now))


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


def _remembered(observation: Observation, fleet: Fleet, now: float) -> Memory:
    """The memory with what this observation adds to it."""
    memory = clamps.until_now(observation.memory, now)
    memory = capacity.remember(memory, observation.pods, fleet.loads, observation.revision, now)
    ready = [pod for pod in fleet.supply if pod.ready]
    unknown = any(pod.name not in fleet.loads for pod in ready) or (
        observation.resource.spec.autoscaling is not None and observation.short is None
    )
    since = memory.metrics_lost_since if memory.metrics_lost_since is not None else now
    return replace(
        memory,
        metrics_lost_since=since if ready and unknown else None,
        failures=backoff.remember(memory.failures, fleet.ended, now),
    )


def _pods(draft: Plan, observation: Observation, fleet: Fleet, wanted: int, in_place: bool, now: float) -> Plan:
    """The writes to pods and agents."""
    spec, name = observation.resource.spec, observation.resource.metadata.name
    generation = observation.resource.metadata.generation
    objectives = tuple(spec.sla.objectives) if spec.sla else ()
    limit = spec.autoscaling.max_replicas if spec.autoscaling else wanted
    moves = rollout.moves(fleet, observation.revision, wanted, limit, spec.rollout, in_place)
    waits = now < backoff.until(draft.memory.failures, observation.revision, wanted)
    stuck = placement.waiting_too_long(fleet.supply, now)
    profile, room = placement.choose(spec.resources.placements, observation.pods, (pod.placement for pod in stuck), moves.create)
    create = names(name, observation.revision, observation.pods, 0 if waits else min(room, moves.create))

    done = [pod for pod in fleet.draining if drain.drained(pod, fleet.loads.get(pod.name), spec.drain_timeout, now)]
    leave = [pod for pod in moves.remove if served(pod, fleet.loads.get(pod.name))]
    drop = [pod for pod in moves.remove if not served(pod, fleet.loads.get(pod.name))]
    lost = [pod for pod in fleet.lost if pod.deleted_at is None]
    over = {pod.name for pod in (*done, *moves.remove)}
    remind = [pod for pod in drain.to_remind(fleet) if pod.name not in over]
    staying = [pod for pod in fleet.supply if pod.name not in over]
    return replace(
        draft,
        create=create,
        placement=profile if create else None,
        config=RuntimeConfig(generation, objectives, spec.engine.batching.max_waiting, spec.drain_timeout),
        configure=_refs(pod for pod in staying if _outdated(fleet, pod, generation)),
        serve=_refs(pod for pod in staying if _may_serve(fleet, pod, generation)),
        drain=_refs((*leave, *remind)),
        delete=_refs((*done, *fleet.ended, *drop, *lost)),
        events=(*draft.events, *events.of_pods(create, leave, done, drop, lost, fleet, now)),
    )


def _outdated(fleet: Fleet, pod: PodView, generation: int) -> bool:
    load = fleet.loads.get(pod.name)
    return load is not None and load.generation < generation


def _may_serve(fleet: Fleet, pod: PodView, generation: int) -> bool:
    """Its engine is warm, and it counts at the objectives as they are now."""
    load = fleet.loads.get(pod.name)
    return pod.ready and not pod.serving and load is not None and load.state == "SERVING" and load.generation >= generation


def _refs(pods: Iterable[PodView]) -> tuple[PodRef, ...]:
    return tuple(PodRef(pod.name, pod.uid, pod.resource_version) for pod in pods)


def _with_block(shown: AutoscalingStatus | None, blocked: str | None) -> AutoscalingStatus | None:
    return shown.model_copy(update={"blocked_by": blocked[:256]}) if shown is not None and blocked is not None else shown


def _revisit(draft: Plan, observation: Observation, fleet: Fleet, moving: bool, wanted: int, now: float) -> float:
    """Seconds until something may change by itself."""
    spec = observation.resource.spec
    times = list(_deadlines(draft.memory, observation, fleet, wanted, spec.drain_timeout, spec.autoscaling))
    soonest = min((at - now for at in times if at > now), default=LATEST)
    if moving or draft.replicas is not None:
        soonest = min(soonest, 1.0)
    return min(max(soonest, SOONEST), LATEST)


def _deadlines(
    memory: Memory, observation: Observation, fleet: Fleet, wanted: int, drain_timeout: float, policy: Autoscaling | None
) -> Iterator[float]:
    yield backoff.until(memory.failures, observation.revision, wanted)
    for pod in fleet.draining:
        yield (pod.draining_since or 0.0) + drain_timeout
    for pod in fleet.supply:
        if pod.unschedulable_since is not None:
            yield pod.unschedulable_since + placement.PATIENCE
    if policy is not None:
        yield from clamps.deadlines(policy, memory)


def _refused(observation: Observation, fleet: Fleet, now: float) -> Plan:
    """The resource is malformed: say so, and touch nothing."""
    resource = observation.resource
    before = resource.status or Status()
    verdict = [
        c.condition(c.READY, False, c.INVALID_SPEC, "the resource cannot be read; see Degraded"),
        *(condition for condition in before.conditions if condition.type not in (c.READY, c.DEGRADED)),
        c.condition(c.DEGRADED, True, c.INVALID_SPEC, observation.error or ""),
    ]
    stamped = c.stamped(verdict, before.conditions, resource.metadata.generation, now)
    shown = before.model_copy(update={**status.counts(observation, fleet), "conditions": stamped})
    return Plan(status=shown, ledger=observation.ledger, memory=observation.memory)
