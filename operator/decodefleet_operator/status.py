"""The status of a resource: what was observed and decided, in the words of the API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decodefleet_operator import conditions as c
from decodefleet_operator import cost
from decodefleet_operator.api import AutoscalingStatus, CapacityStatus, ColdStart, Condition, PodStatus, Status
from decodefleet_operator.autoscale import Decision
from decodefleet_operator.fleet import Fleet, available
from decodefleet_operator.observation import Load, Observation, PodView
from decodefleet_operator.sla import sla_status

MOST_PODS = 64


def build(
    observation: Observation,
    fleet: Fleet,
    conditions: Sequence[Condition],
    autoscaling: AutoscalingStatus | None,
    decision: Decision,
    now: float,
) -> Status:
    """The whole status; `autoscaling` is the decision's, with what blocks it. Numbers that are not known are absent."""
    resource = observation.resource
    spec = resource.spec
    rate = observation.short.generated_tokens if observation.short is not None else None
    hourly = cost.per_hour((*fleet.supply, *fleet.draining, *fleet.terminating, *fleet.lost), spec.resources.placements)
    return Status(
        **counts(observation, fleet),
        tokens_per_second=round(rate, 1) if rate is not None else None,
        conditions=c.stamped(conditions, resource.status.conditions if resource.status else (), resource.metadata.generation, now),
        sla=sla_status(observation.ledger, spec.sla, fleet.loads.values(), now) if spec.sla else None,
        autoscaling=autoscaling,
        capacity=_capacity(decision),
        cost=cost.cost_status(hourly, rate, spec.cost.currency if spec.cost else "USD"),
        pods=[pod_status(pod, fleet.loads.get(pod.name)) for pod in _first(observation.pods)],
    )


def counts(observation: Observation, fleet: Fleet) -> dict[str, int | str | None]:
    """The fields of a status that speak of pods alone."""
    resource = observation.resource
    return {
        "observed_generation": resource.metadata.generation,
        "replicas": len(fleet.supply),
        "ready_replicas": sum(available(pod) for pod in fleet.supply),
        "updated_replicas": sum(pod.revision == observation.revision for pod in fleet.supply),
        "selector": f"decodefleet.dev/deployment={resource.metadata.name}",
        "endpoint": observation.endpoint,
        "revision": observation.revision or None,
    }


def pod_status(pod: PodView, load: Load | None) -> PodStatus:
    """One pod; `load` is None where it is not known."""
    used = f"{100 * load.kv_bytes_used / load.kv_bytes_total:.0f}%" if load is not None and load.kv_bytes_total else None
    return PodStatus(
        name=pod.name,
        phase=phase(pod),
        revision=pod.revision or None,
        running=load.running if load is not None else None,
        waiting=load.waiting if load is not None else None,
        kv_used=used,
        draining=pod.draining_since is not None,
        cold_start=_cold_start(pod, load),
    )


def phase(pod: PodView) -> str:
    """Pending, Starting, Ready, Draining, Terminating, Lost or Failed."""
    if pod.lost:
        return "Lost"
    if pod.deleted_at is not None:
        return "Terminating"
    if pod.phase in ("Failed", "Succeeded"):
        return "Failed" if pod.phase == "Failed" else "Terminating"
    if pod.draining_since is not None:
        return "Draining"
    if pod.ready:
        return "Ready"
    return "Starting" if pod.started_at is not None or pod.phase == "Running" else "Pending"


def _capacity(decision: Decision) -> CapacityStatus | None:
    if decision.capacity is None or decision.operating is None:
        return None
    point = decision.operating.point
    return CapacityStatus(
        tokens_per_second=round(point.tokens_per_second, 1), measured_at=c.timestamp(decision.capacity.measured_at), batch=point.batch
    )


def _first(pods: Iterable[PodView]) -> list[PodView]:
    return sorted(pods, key=lambda pod: (pod.created_at, pod.name))[:MOST_PODS]


def _cold_start(pod: PodView, load: Load | None) -> ColdStart | None:
    phases = {
        "schedule": _between(pod.created_at, pod.scheduled_at),
        "pull": _between(pod.scheduled_at, pod.started_at),
        "load": _rounded(load.load_seconds if load is not None else None),
        "warm_up": _rounded(load.warm_up_seconds if load is not None else None),
    }
    return ColdStart(**phases) if any(value is not None for value in phases.values()) else None


def _between(start: float | None, end: float | None) -> float | None:
    return _rounded(end - start) if start is not None and end is not None and end >= start else None


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 1) if seconds is not None else None
