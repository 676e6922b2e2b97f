"""Condition types, their reasons, and the reasons of events: the words that users, alerts and tests may rely on."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from decodefleet_operator.api import Condition

# -- types -----------------------------------------------------------------------------------------------------------------------

READY = "Ready"  # as many replicas of the newest revision serve as are wanted; speaks of observedGeneration
PROGRESSING = "Progressing"  # pods are on their way to what is wanted
SLA_MET = "SLAMet"  # every objective with requests in its window keeps its target
METRICS_FRESH = "MetricsFresh"  # every pod that is or was ready answered GetLoad lately
CAPACITY_AVAILABLE = "CapacityAvailable"  # the cluster finds room for the pods that are asked for
DEGRADED = "Degraded"  # something needs a person

# -- reasons of Ready ------------------------------------------------------------------------------------------------------------

ALL_SERVING = "AllServing"  # True
SCALED_TO_ZERO = "ScaledToZero"  # True: none are wanted
PODS_STARTING = "PodsStarting"  # False
ROLLING_OUT = "RollingOut"  # False of Ready, True of Progressing: pods of an older revision remain

# -- reasons of Progressing ------------------------------------------------------------------------------------------------------

STABLE = "Stable"  # False: nothing to do
SCALING = "Scaling"  # True
SUSPENDED = "Suspended"  # False: spec.suspend
BLOCKED = "Blocked"  # False: Degraded says by what
NO_SURGE_CAPACITY = "NoSurgeCapacity"  # False: the surge pod of a rollout finds no node
ROLLOUT_STALLED = "RolloutStalled"  # False: pods of the new revision do not become ready

# -- reasons of SLAMet -----------------------------------------------------------------------------------------------------------

OBJECTIVES_MET = "ObjectivesMet"  # True
OBJECTIVE_MISSED = "ObjectiveMissed"  # False
NO_OBJECTIVES = "NoObjectives"  # Unknown: spec.sla names none
NO_REQUESTS = "NoRequests"  # Unknown: none in the window

# -- reasons of MetricsFresh -----------------------------------------------------------------------------------------------------

FRESH = "Fresh"  # True
STALE = "Stale"  # False: the replica count is held, or cannot shrink
NO_READY_PODS = "NoReadyPods"  # Unknown: nothing to ask

# -- reasons of CapacityAvailable ------------------------------------------------------------------------------------------------

SCHEDULED = "Scheduled"  # True
INSUFFICIENT_CAPACITY = "InsufficientCapacity"  # False: a pod is unschedulable for too long; no more are asked for

# -- reasons of Degraded ---------------------------------------------------------------------------------------------------------

AS_EXPECTED = "AsExpected"  # False
INVALID_SPEC = "InvalidSpec"  # the resource could not be read; nothing is changed
UNSUPPORTED = "Unsupported"  # this version does not have what a field asks for
CRASH_LOOPING = "CrashLooping"  # an agent ends again and again
POD_FAILING = "PodFailing"  # a pod does not start
POD_SILENT = "PodSilent"  # a pod that was ready does not answer any more
OBJECT_REJECTED = "ObjectRejected"  # the API server refused another object of the fleet (quota, admission, rights)
POD_REJECTED = "PodRejected"  # the API server refused a pod (quota, admission, rights)

# -- reasons of events -----------------------------------------------------------------------------------------------------------

SCALED_UP = "ScaledUp"
SCALED_DOWN = "ScaledDown"
CREATING = "Creating"
DRAINING = "Draining"
DRAINED = "Drained"
DRAIN_TIMEOUT = "DrainTimeout"
DELETING = "Deleting"
POD_ENDED = "PodEnded"
POD_LOST = "PodLost"
RESTARTING = "Restarting"
ROLLOUT_STARTED = "RolloutStarted"


def timestamp(at: float) -> str:
    """RFC 3339 of Unix seconds, to the second, in UTC."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(type_: str, holds: bool | None, reason: str, message: str = "") -> Condition:
    """A condition without its time; None is Unknown."""
    return Condition(type=type_, status={True: "True", False: "False", None: "Unknown"}[holds], reason=reason, message=message[:2048])


def stamped(conditions: Iterable[Condition], before: Iterable[Condition], generation: int, now: float) -> list[Condition]:
    """The conditions with lastTransitionTime: the one they had before where status is the same, else now."""
    known = {c.type: c for c in before}
    stamp = timestamp(now)
    result = []
    for c in conditions:
        old = known.get(c.type)
        since = old.last_transition_time if old is not None and old.status == c.status and old.last_transition_time else stamp
        result.append(c.model_copy(update={"last_transition_time": since, "observed_generation": generation}))
    return result
