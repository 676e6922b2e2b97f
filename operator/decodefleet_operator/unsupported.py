"""What the resource can ask for and this version does not have. One table; each entry names its field and value in Degraded/Unsupported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from decodefleet.config import SparsityPolicy
from decodefleet.units import parse_duration
from decodefleet_operator.api import Spec


class Feature(NamedTuple):
    """A field whose value may be one that is not built."""

    path: str
    value: Callable[[Spec], object]  # None: not asked for
    supported: Callable[[object], bool]
    blocking: bool  # pods cannot run as the field asks: nothing of the fleet is changed. Otherwise only the field has no effect


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: str(value) in map(str, values)


def _first_schedule(spec: Spec) -> str | None:
    return next((schedule.cron for schedule in spec.autoscaling.schedules), None) if spec.autoscaling else None


def _hierarchical_without_int8(spec: Spec) -> str | None:
    """Pages are chosen by the native backend alone, which does not compute in fp32 weights, and from int8 keys."""
    precision, policy = spec.engine.precision, spec.engine.kv_cache.sparsity.policy
    if policy != SparsityPolicy.Hierarchical:
        return None
    if precision.weights == "fp32":
        return "Hierarchical with precision.weights fp32"
    return None if precision.kv_cache in ("auto", "int8") else f"Hierarchical with precision.kvCache {precision.kv_cache}"


FEATURES = (
    Feature("spec.engine.precision.weights", lambda s: s.engine.precision.weights, _is("auto", "fp32"), True),
    Feature("spec.engine.precision.attention", lambda s: s.engine.precision.attention, _is("auto", "fp32"), True),
    Feature("spec.engine.precision.kvCache", lambda s: s.engine.precision.kv_cache, _is("auto", "int8", "fp8", "fp32"), True),
    Feature("spec.engine.kvCache.sparsity.policy", _hierarchical_without_int8, _is(None), True),
    Feature("spec.engine.precision.schedule", lambda s: s.engine.precision.schedule, _is("Static"), True),
    Feature("spec.engine.batching.controller", lambda s: s.engine.batching.controller, _is("SLAFeedback", "Static"), True),
    Feature("spec.engine.prediction.method", lambda s: s.engine.prediction.method, _is("None"), True),
    Feature("spec.parallelism.tensor", lambda s: s.parallelism.tensor, _is(1), True),
    Feature("spec.rollout.canary", lambda s: s.rollout.canary and f"replicas: {s.rollout.canary.replicas}", _is(None), True),
    Feature("spec.rollout.upgradePolicy", lambda s: s.rollout.upgrade_policy, _is("OnSpecChange"), False),
    Feature("spec.autoscaling.minReplicas", lambda s: s.autoscaling.min_replicas if s.autoscaling else None, lambda v: v != 0, False),
    Feature("spec.autoscaling.schedules", _first_schedule, _is(None), False),
    Feature("spec.sla.window", lambda s: s.sla.window if s.sla else None, lambda v: parse_duration(str(v)) <= 3600, False),
)  # fmt: skip

EFFECT = {
    "spec.autoscaling.minReplicas": "1 is used",
    "spec.autoscaling.schedules": "the floors are not applied",
    "spec.sla.window": "1h is used",
}


class Found(NamedTuple):
    message: str
    blocking: bool


def unsupported(spec: Spec, gpu_profiles: Collection[str] = ()) -> list[Found]:
    """What the spec asks for in vain. `gpu_profiles`: the placement profiles that bring a GPU."""
    return list(_found(spec, gpu_profiles))


def _found(spec: Spec, gpu_profiles: Collection[str]) -> Iterator[Found]:
    for feature in FEATURES:
        value = feature.value(spec)
        if value is not None and not feature.supported(value):
            effect = f" ({EFFECT[feature.path]})" if feature.path in EFFECT else ""
            yield Found(f"{feature.path}: {value} is not supported by this version{effect}", feature.blocking)
    # The backend of GPUs has int8 alone: a pod would hold the GPU and compute on its cores.
    gpu = next((placement.profile for placement in spec.resources.placements if placement.profile in gpu_profiles), None)
    if spec.engine.precision.kv_cache == "fp8" and gpu is not None:
        yield Found(
            f"spec.engine.precision.kvCache: fp8 with placement {gpu}, which has GPUs, is not supported by this version", blocking=True
        )
