"""What a reconcile knows: one frozen Observation. A number that could not be read is None, never zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.ledger import Ledger


class Key(NamedTuple):
    """Names a resource."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PodView:
    """The part of a pod (or of a local process) that decisions need. Times are Unix seconds."""

    name: str
    uid: str
    resource_version: str
    revision: str
    created_at: float
    phase: str = "Pending"  # as in Kubernetes: Pending, Running, Succeeded, Failed
    ready: bool = False
    serving: bool = False  # the serving label is on
    draining_since: float | None = None  # the draining annotation
    deleted_at: float | None = None  # deletionTimestamp
    placement: str | None = None
    node: str | None = None
    address: str | None = None  # host or IP of the agent's ports
    serving_port: int = 50051
    control_port: int = 50052
    scheduled_at: float | None = None
    started_at: float | None = None
    ready_at: float | None = None
    unschedulable_since: float | None = None
    lost: bool = False  # its node is gone, or the process vanished
    restarts: int = 0
    problem: str | None = None  # waiting reason or last termination message, for a person
    silent_since: float | None = None  # it was ready, runs on, and has not answered GetLoad since

    @property
    def leaving(self) -> bool:
        """It drains, is being deleted, is lost or has ended: no longer supply."""
        return self.draining_since is not None or self.deleted_at is not None or self.lost or self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class ObjectiveCount:
    """Requests counted at the threshold of one epoch."""

    good: int
    total: int
    threshold: float
    epoch: int
    observed: float | None = None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    batch: int
    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Load:
    """One answer to GetLoad, and when it came (Unix seconds). Fields are those of the proto."""

    at: float
    instance_id: str
    state: str  # LOADING, WARMING_UP, SERVING, DRAINING
    generation: int
    running: int
    waiting: int
    queued_prompt_tokens: int
    queued_output_tokens: int
    kv_bytes_used: int
    kv_bytes_total: int
    kv_bytes_cached: int
    arrived_requests: int
    arrived_prompt_tokens: int
    arrived_max_tokens: int
    prompt_tokens: int
    generated_tokens: int
    finished_requests: int
    finished_output_tokens: int
    failed_requests: int
    rejected_requests: int
    busy_seconds: float
    objectives: dict[str, ObjectiveCount] = field(default_factory=dict)
    load_seconds: float | None = None
    warm_up_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    curve: tuple[CurvePoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """Fleet-wide rates over a window, from differences of the agents' counters; resets and replaced pods are taken out."""

    window: float  # seconds actually covered
    requests: float  # arrived per second, rejected ones included
    prompt_tokens: float  # arrived per second
    output_tokens: float  # arrived requests x mean output length, per second
    generated_tokens: float  # served per second
    busy: float | None = None  # mean share of time that engines were in a step


@dataclass(frozen=True, slots=True)
class Failure:
    """A pod that ended when nobody asked it to."""

    at: float
    uid: str
    revision: str
    problem: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision remembers of earlier ones. A new operator starts with an empty one, which never makes a fleet shrink early."""

    since: float  # when this memory began
    recommendations: tuple[tuple[float, int], ...] = ()  # (time, count before stabilisation), oldest first
    metrics_lost_since: float | None = None
    foreign_replicas: tuple[float, int, str] | None = None  # (time, count, manager) of the last write to spec.replicas by somebody else
    capacity: tuple[tuple[str, tuple[CurvePoint, ...], float | None, float], ...] = ()  # revision -> curve, prefill rate, measured at
    measured: tuple[str, ...] = ()  # instance ids whose measurements are in `capacity`
    decisions: tuple[tuple[float, int], ...] = ()  # (time, count that pods follow from then on), oldest first
    failures: tuple[Failure, ...] = ()  # of the last ten minutes


@dataclass(frozen=True, slots=True)
class ReplicasWriter:
    """Who wrote spec.replicas last, from managedFields."""

    manager: str
    at: float | None
    ours: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """All that plan() may know."""

    resource: DecoderDeployment
    revision: str  # of the resource as it is now
    pods: tuple[PodView, ...]
    loads: dict[str, Load]  # by pod name; the newest answer, however old. No answer yet: absent
    short: Demand | None  # None: not known
    long: Demand | None
    ledger: Ledger
    memory: Memory
    replicas_writer: ReplicasWriter | None = None
    endpoint: str | None = None
    max_load_age: float = 10.0  # seconds; an older Load is unknown
    error: str | None = None  # the spec could not be read; nothing but the status may change
    gpu_profiles: frozenset[str] = frozenset()  # placement profiles whose pods ask for a GPU
    warnings: tuple[tuple[str, str], ...] = ()  # (reason, message) of apply failures that a person must see, such as PodRejected
