"""The DecoderDeployment resource: the one source of the CRD, of local mode's files and of what the operator reads and writes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from decodefleet.config import Engine, Model
from decodefleet.units import Duration, Period, Quantity, parse_duration

GROUP = "decodefleet.dev"
VERSION = "v1alpha1"
KIND = "DecoderDeployment"
PLURAL = "decoderdeployments"
API_VERSION = f"{GROUP}/{VERSION}"

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Text = Annotated[str, Field(max_length=1024)]


def _sign_given(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"{value} has no percent sign; write it as {value * 100 if 0 < value < 1 else value:g}%")
    return value


Percent = Annotated[str, Field(pattern=r"^[0-9]{1,2}(\.[0-9]{1,4})?%$", max_length=9), BeforeValidator(_sign_given)]


def parse_percent(text: str) -> float:
    """0.95 of `95%`."""
    return float(text.removesuffix("%")) / 100


# -- spec ------------------------------------------------------------------------------------------------------------------------


class ModelSource(Model):
    """Where the model comes from."""

    uri: Annotated[str, Field(pattern=r"^(hf|file|pvc|package)://.+", max_length=1024)] = Field(
        description="hf://org/name@revision, file:///path in the image or a volume, pvc://claim/path, "
        "or package://python_package/file.gguf. Changing it is a rollout."
    )


class Parallelism(Model):
    """How one replica spreads over devices."""

    tensor: int = Field(1, ge=1, le=64, description="GPUs of one replica.")


class AutoscalingMode(StrEnum):
    Active = "Active"
    Recommend = "Recommend"


class Schedule(Model):
    """A floor under the replica count that starts at a time of day."""

    cron: Annotated[str, Field(max_length=128)] = Field(description="When the floor starts, in five cron fields.")
    timezone: Annotated[str, Field(max_length=64)] = Field("UTC", description="An IANA time zone.")
    min_replicas: int = Field(ge=0, le=10000, description="The floor, until the next schedule starts.")


class ScaleUp(Model):
    """How fast a fleet may grow."""

    stabilization: Duration = Field("0s", description="Grow to the smallest count that was asked for throughout this time.")
    max_pods_per_minute: int = Field(100, ge=1, le=10000, description="Pods added in any minute, at most.")


class ScaleDown(Model):
    """How fast a fleet may shrink, and how its pods leave."""

    stabilization: Duration = Field("300s", description="Shrink to the largest count that was asked for throughout this time.")
    drain_timeout: Duration = Field("120s", description="How long a leaving pod may finish its open streams.")
    max_pods_per_minute: int = Field(100, ge=1, le=10000, description="Pods taken out in any minute, at most.")


class Autoscaling(Model):
    """Sets the replica count from measured demand. Absent: the count is the user's."""

    mode: AutoscalingMode = Field(AutoscalingMode.Active, description="Recommend decides and reports, and changes nothing.")
    min_replicas: int = Field(1, ge=0, le=10000, description="Never fewer. 0 needs a gateway that holds the first request.")
    max_replicas: int = Field(ge=1, le=10000, description="Never more.")
    target_utilization: float = Field(0.8, ge=0.05, le=1, description="Share of a replica's capacity that demand should fill.")
    tolerance: float = Field(0.1, ge=0, le=1, description="Demand this close to what the present count carries changes nothing.")
    backlog_target: Duration = Field("10s", description="Time in which waiting requests should be gone.")
    short_window: Period = Field("30s", description="Demand over this time makes a fleet grow.")
    long_window: Period = Field("300s", description="Demand over this time keeps a fleet from shrinking.")
    schedules: Annotated[list[Schedule], Field(max_length=32)] = Field(default_factory=list, description="Floors by time of day.")
    scale_up: ScaleUp = Field(default_factory=ScaleUp, description="How fast the fleet may grow.")
    scale_down: ScaleDown = Field(default_factory=ScaleDown, description="How fast it may shrink, and how pods leave.")

    @model_validator(mode="after")
    def _ordered(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"minReplicas {self.min_replicas} is more than maxReplicas {self.max_replicas}; lower one or raise the other")
        return self


class Metric(StrEnum):
    TimeToFirstToken = "TimeToFirstToken"
    TimePerOutputToken = "TimePerOutputToken"
    Availability = "Availability"
    RequestDuration = "RequestDuration"
    QueueTime = "QueueTime"


class Objective(Model):
    """One promise: this share of requests within this threshold."""

    name: Name = Field(description="Its name in status, metrics and alerts.")
    metric: Metric = Field(description="What is measured. Availability counts requests that succeeded.")
    threshold: Period | None = Field(None, description="A request within it is good. Absent for Availability only.")
    target: Percent = Field(description="The share of good requests that is promised, such as 99.5%.")

    @model_validator(mode="after")
    def _threshold_where_needed(self) -> Objective:
        if (self.metric == Metric.Availability) != (self.threshold is None):
            raise ValueError(f"objective {self.name}: {self.metric} {'takes no' if self.threshold else 'needs a'} threshold")
        return self


class Sla(Model):
    """What the fleet promises."""

    window: Period = Field("1h", description="Attainment and error budget are counted over this time: 1h, 6h or up to 30d.")
    objectives: Annotated[list[Objective], Field(max_length=16)] = Field(default_factory=list, description="The promises, by name.")

    @model_validator(mode="after")
    def _names_differ(self) -> Sla:
        names = [o.name for o in self.objectives]
        if len(set(names)) < len(names):
            raise ValueError(f"objectives need different names, not {names}")
        return self


class WhenFull(StrEnum):
    Wait = "Wait"
    ReplaceInPlace = "ReplaceInPlace"


class UpgradePolicy(StrEnum):
    OnSpecChange = "OnSpecChange"
    Always = "Always"


class Canary(Model):
    """A few pods of a new revision that prove it first."""

    replicas: int = Field(1, ge=1, le=1000, description="Pods of the new revision.")
    bake: Duration = Field("5m", description="How long they are watched.")


class Rollout(Model):
    """How pods of a new revision replace those of the old one."""

    max_surge: int = Field(1, ge=0, le=1000, description="Pods above the replica count during a rollout.")
    max_unavailable: int = Field(0, ge=0, le=1000, description="Pods below it.")
    when_full: WhenFull = Field(WhenFull.Wait, description="What to do when no surge pod can be scheduled.")
    canary: Canary | None = Field(None, description="Prove the new revision on a few pods first.")
    upgrade_policy: UpgradePolicy = Field(UpgradePolicy.OnSpecChange, description="Whether a new operator's rendering alone restarts pods.")

    @model_validator(mode="after")
    def _can_move(self) -> Rollout:
        if self.max_surge == 0 and self.max_unavailable == 0:
            raise ValueError("maxSurge and maxUnavailable are both 0, so no pod could ever be replaced; raise one")
        return self


class Placement(Model):
    """A kind of machine that replicas may run on."""

    profile: Name = Field(description="A placement profile of the chart's values.")
    max_replicas: int | None = Field(None, ge=0, le=10000, description="Replicas on it, at most.")
    hourly_price: float | None = Field(None, ge=0, description="Price of one pod for an hour. Absent: unknown, not zero.")


class Resources(Model):
    """What each pod gets."""

    cpu: Quantity | None = Field(None, description="Cores, request and limit.")
    memory: Quantity | None = Field(None, description="Memory, request and limit.")
    placements: Annotated[list[Placement], Field(max_length=16)] = Field(
        default_factory=list, description="Kinds of machine, tried in order."
    )


class Cost(Model):
    """What the fleet may cost."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$", max_length=3)] = Field("USD", description="An ISO 4217 code; prices are in it.")
    max_per_hour: float | None = Field(None, ge=0, description="A clamp on the replica count.")


Untyped = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


class PodTemplate(Model):
    """What else Kubernetes should give each pod, as in a PodSpec."""

    annotations: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)] = Field(
        default_factory=dict, description="Annotations of each pod."
    )
    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict, description="Labels of each pod, beside decodefleet's own."
    )
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict, description="Labels that a node must have."
    )
    tolerations: Annotated[list[Untyped], Field(max_length=32)] = Field(default_factory=list, description="Taints that pods tolerate.")
    affinity: Untyped | None = Field(None, description="Scheduling affinity.")
    env: Annotated[list[Untyped], Field(max_length=64)] = Field(default_factory=list, description="Environment of the agent's container.")
    volumes: Annotated[list[Untyped], Field(max_length=32)] = Field(default_factory=list, description="Volumes of the pod.")
    volume_mounts: Annotated[list[Untyped], Field(max_length=32)] = Field(
        default_factory=list, description="Where the agent's container has them."
    )
    image_pull_secrets: Annotated[list[Untyped], Field(max_length=8)] = Field(
        default_factory=list, description="Secrets for the image registry."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(None, description="As in a container.")
    service_account_name: Name | None = Field(None, description="The pod's service account; its token is not mounted.")
    priority_class_name: Name | None = Field(None, description="The pod's priority class.")
    runtime_class_name: Name | None = Field(None, description="The pod's runtime class.")


class Spec(Model):
    """The fleet that is wanted."""

    image: Text | None = Field(
        None, description="The agent's image. Absent: the operator's default; the resolved one is kept in the ControllerRevision."
    )
    replicas: int = Field(1, ge=0, le=10000, description="Pods wanted. With autoscaling the operator writes its decision here.")
    suspend: bool = Field(False, description="Decide and report, and change nothing.")
    model: ModelSource = Field(description="The model that is served.")
    engine: Engine = Field(default_factory=Engine, description="The decoding engine of each replica.")
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How one replica spreads over devices.")
    autoscaling: Autoscaling | None = Field(None, description="Sets the replica count from measured demand. Absent: the count is yours.")
    sla: Sla | None = Field(None, description="What the fleet promises; counted exactly, reported in the status.")
    rollout: Rollout = Field(default_factory=Rollout, description="How a new revision replaces the old one.")
    resources: Resources = Field(default_factory=Resources, description="What each pod gets.")
    cost: Cost | None = Field(None, description="What the fleet may cost.")
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="What else Kubernetes should give each pod.")

    @property
    def drain_timeout(self) -> float:
        """Seconds that a leaving pod may finish its streams."""
        return parse_duration((self.autoscaling.scale_down if self.autoscaling else ScaleDown()).drain_timeout)


# -- status ----------------------------------------------------------------------------------------------------------------------


class Condition(Model):
    """As in Kubernetes. Reasons are in conditions.py."""

    type: Annotated[str, Field(max_length=64)] = Field(
        description="Ready, Progressing, SLAMet, MetricsFresh, CapacityAvailable or Degraded."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(max_length=64)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=2048)] = Field("", description="Why, for a person.")
    last_transition_time: Annotated[str, Field(max_length=40)] | None = Field(None, description="When status last changed.")
    observed_generation: int | None = Field(None, description="The generation of the spec that it speaks of.")


class ObjectiveStatus(Model):
    """How one promise is kept over the window. A number that is not known is absent."""

    name: Name = Field(description="The objective.")
    metric: Metric = Field(description="What is measured.")
    threshold: Annotated[str, Field(max_length=32)] | None = Field(None, description="A request within it is good.")
    target: Percent = Field(description="The promised share.")
    observed: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="The measured value at the target's quantile over recent requests."
    )
    attainment: Annotated[str, Field(max_length=16)] | None = Field(None, description="The share that was kept.")
    error_budget_remaining: Annotated[str, Field(max_length=16)] | None = Field(
        None, description="Share of the allowed bad requests that is left; negative when overspent."
    )
    burn_rate: float | None = Field(
        None, description="Speed at which the budget is spent over the last 5 minutes; 1 spends it exactly in the window."
    )
    requests: int | None = Field(None, description="Requests in the window.")


class SlaStatus(Model):
    objectives: Annotated[list[ObjectiveStatus], Field(max_length=16)] = Field(default_factory=list, description="By name.")
    attainment: Annotated[str, Field(max_length=16)] | None = Field(None, description="The lowest of the objectives' attainments.")


class AutoscalingStatus(Model):
    """The last decision, with all that went into it."""

    desired: int | None = Field(None, description="The count that was decided.")
    reason: Annotated[str, Field(max_length=256)] | None = Field(None, description="Why, for a person.")
    inputs: Annotated[dict[str, Annotated[str, Field(max_length=64)]], Field(max_length=32)] = Field(
        default_factory=dict, description="The numbers in the formula, by name."
    )
    clamped_by: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=16)] = Field(
        default_factory=list, description="Each limit that changed the count, in order."
    )
    blocked_by: Annotated[str, Field(max_length=256)] | None = Field(None, description="What keeps the decision from being carried out.")


class CapacityStatus(Model):
    tokens_per_second: float | None = Field(None, description="What one replica generates, as warm-up measured.")
    measured_at: Annotated[str, Field(max_length=40)] | None = Field(None, description="When.")
    batch: int | None = Field(None, description="At this batch size.")


class CostStatus(Model):
    per_hour: Annotated[str, Field(max_length=32)] | None = Field(None, description="What the present pods cost in an hour.")
    per_million_tokens: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="That, per million generated tokens at the present rate."
    )
    gpu_hours_today: Annotated[str, Field(max_length=32)] | None = Field(None, description="GPU-hours since midnight UTC.")


class ColdStart(Model):
    """Seconds of each phase of a start."""

    schedule: float | None = Field(None, description="Until a node was found.")
    pull: float | None = Field(None, description="Until the container started.")
    load: float | None = Field(None, description="Loading weights.")
    warm_up: float | None = Field(None, description="Warming up.")


class PodStatus(Model):
    name: Annotated[str, Field(max_length=253)] = Field(description="The pod.")
    phase: Annotated[str, Field(max_length=32)] = Field(description="Pending, Starting, Ready, Draining, Terminating, Lost or Failed.")
    revision: Annotated[str, Field(max_length=63)] | None = Field(None, description="The revision that it runs.")
    running: int | None = Field(None, description="Sequences that decode.")
    waiting: int | None = Field(None, description="Requests that wait.")
    kv_used: Annotated[str, Field(max_length=16)] | None = Field(None, description="Used share of its KV pool.")
    draining: bool = Field(False, description="Whether it is leaving.")
    cold_start: ColdStart | None = Field(None, description="How long its start took.")


class Status(Model):
    """The fleet as it is."""

    observed_generation: int | None = Field(None, description="The generation of the spec that this speaks of.")
    replicas: int = Field(0, description="Pods that exist and do not leave.")
    ready_replicas: int = Field(0, description="Of those, the ready ones.")
    updated_replicas: int = Field(0, description="Of those, the ones of the newest revision.")
    selector: Annotated[str, Field(max_length=512)] | None = Field(None, description="Selects the fleet's pods, for the scale subresource.")
    endpoint: Annotated[str, Field(max_length=512)] | None = Field(None, description="Where clients connect.")
    revision: Annotated[str, Field(max_length=63)] | None = Field(None, description="The newest revision.")
    tokens_per_second: float | None = Field(None, description="Generated tokens per second over the last minute.")
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default_factory=list, description="Ready, Progressing, SLAMet, MetricsFresh, CapacityAvailable, Degraded."
    )
    sla: SlaStatus | None = Field(None, description="How the promises are kept.")
    autoscaling: AutoscalingStatus | None = Field(None, description="Why the fleet has the size it has.")
    capacity: CapacityStatus | None = Field(None, description="What one replica can do.")
    cost: CostStatus | None = Field(None, description="What it costs.")
    pods: Annotated[list[PodStatus], Field(max_length=64)] = Field(default_factory=list, description="The first 64 pods.")


class Metadata(Model):
    """The part of ObjectMeta that the operator uses."""

    model_config = Model.model_config | {"extra": "ignore"}

    name: Name
    namespace: Annotated[str, Field(max_length=63)] = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)


class DecoderDeployment(Model):
    """A managed decoding fleet: one resource becomes pods that serve a model over gRPC."""

    api_version: Literal["decodefleet.dev/v1alpha1"] = "decodefleet.dev/v1alpha1"
    kind: Literal["DecoderDeployment"] = "DecoderDeployment"
    metadata: Metadata
    spec: Spec
    status: Status | None = None
