"""A plan is a value: all that apply() should make true. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass

from decodefleet_operator.api import Objective, Status
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.observation import Memory


@dataclass(frozen=True, slots=True)
class PodRef:
    """Names a pod for a write that must not hit another one of the same name."""

    name: str
    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What Configure tells running agents."""

    generation: int
    objectives: tuple[Objective, ...]
    max_waiting: int
    drain_timeout: float


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event on the resource."""

    type: str  # Normal or Warning
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The writes that a reconcile decided. apply() makes them in this order; each is idempotent."""

    status: Status
    ledger: Ledger
    memory: Memory
    create: tuple[str, ...] = ()  # names of new pods, of Observation.revision
    placement: str | None = None  # for the new pods
    replicas: int | None = None  # to write to spec.replicas through /scale
    configure: tuple[PodRef, ...] = ()  # agents that should get `config`
    config: RuntimeConfig | None = None
    serve: tuple[PodRef, ...] = ()  # serving label on
    drain: tuple[PodRef, ...] = ()  # serving label off, draining annotation on, Drain called
    delete: tuple[PodRef, ...] = ()
    events: tuple[Event, ...] = ()
    revisit_after: float = 10.0  # seconds
