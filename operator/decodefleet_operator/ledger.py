"""The SLA ledger: good and total requests per objective in time buckets, and the counters that they were taken from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of one objective in [start, start + width) Unix seconds."""

    start: int
    width: int
    good: int
    total: int


@dataclass(frozen=True, slots=True)
class Base:
    """The counters of one agent instance that are in the ledger already."""

    pod: str
    instance_id: str
    at: float
    in_flight: int  # counted bad if the instance is lost
    counts: dict[str, tuple[int, int, int]]  # objective -> (epoch, good, total)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Written whole and in one write, so that buckets and bases never disagree. At most 64 KiB as JSON."""

    buckets: dict[str, tuple[Bucket, ...]] = field(default_factory=dict)  # by objective, oldest first
    bases: dict[str, Base] = field(default_factory=dict)  # by instance id
    thresholds: dict[str, float] = field(default_factory=dict)  # by objective; another one starts a new window
