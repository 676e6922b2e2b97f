"""What decisions need of raw Kubernetes objects: a PodView of a pod, a DecoderDeployment and who wrote its replica count."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from decodefleet_operator.api import KIND, DecoderDeployment, Metadata, ModelSource, Spec, Status
from decodefleet_operator.cluster.client import FIELD_MANAGER, Object
from decodefleet_operator.invalid import explain
from decodefleet_operator.observation import Key, PodView, ReplicasWriter
from decodefleet_operator.render import (
    CONTAINER,
    CONTROL_PORT,
    DEPLOYMENT_LABEL,
    DRAINING_ANNOTATION,
    PLACEMENT_LABEL,
    REVISION_LABEL,
    SERVING_LABEL,
    SERVING_PORT,
    SPEC_HASH_LABEL,
)


def seconds(timestamp: str | None) -> float | None:
    """Unix seconds of an RFC 3339 timestamp; None where there is none or it is unreadable."""
    try:
        return datetime.fromisoformat(timestamp).timestamp() if timestamp else None
    except ValueError:
        return None


# -- pods ------------------------------------------------------------------------------------------------------------------------


def pod_view(raw: Object) -> PodView:
    """A pod, reduced."""
    metadata, spec, status = raw["metadata"], raw.get("spec", {}), raw.get("status", {})
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    created_at = seconds(metadata["creationTimestamp"]) or 0.0
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
    container: Object = next((c for c in status.get("containerStatuses", ()) if c["name"] == CONTAINER), {})
    ports = {p.get("name"): p["containerPort"] for c in spec.get("containers", ()) if c["name"] == CONTAINER for p in c.get("ports", ())}
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    draining = annotations.get(DRAINING_ANNOTATION)
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        revision=labels.get(REVISION_LABEL, ""),
        created_at=created_at,
        phase=status.get("phase", "Pending"),
        ready=ready.get("status") == "True",
        serving=labels.get(SERVING_LABEL) == "true",
        # A mark that cannot be read still is one; its time then is the pod's first moment, so that the drain ends rather than lasts.
        draining_since=None if draining is None else seconds(draining) or created_at,
        deleted_at=seconds(metadata.get("deletionTimestamp")),
        placement=labels.get(PLACEMENT_LABEL),
        node=spec.get("nodeName"),
        address=status.get("podIP"),
        serving_port=ports.get("serving", SERVING_PORT),
        control_port=ports.get("control", CONTROL_PORT),
        scheduled_at=seconds(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        started_at=seconds(container.get("state", {}).get("running", {}).get("startedAt")),
        ready_at=seconds(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
        unschedulable_since=seconds(scheduled.get("lastTransitionTime")) or created_at if unschedulable else None,
        lost=status.get("reason") == "NodeLost" or status.get("phase") == "Unknown",
        restarts=container.get("restartCount", 0),
        problem=_problem(container, scheduled if unschedulable else {}),
    )


def _problem(container: Object, unschedulable: Object) -> str | None:
    """Why it waits, else how its last run ended, in at most 500 characters."""
    waiting = container.get("state", {}).get("waiting", {})
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
    parts: list[str] = []
    if unschedulable:
        parts.append(unschedulable.get("message") or "Unschedulable")
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        parts.append(": ".join(p for p in (waiting["reason"], waiting.get("message")) if p))
    if ended.get("exitCode"):
        parts.append(f"exit code {ended['exitCode']}: {ended.get('message') or ended.get('reason', '')}".strip(": \n"))
    return "; ".join(parts)[:500] or None


def owner_uid(raw: Object) -> str | None:
    """The uid of the DecoderDeployment that controls the object."""
    owners = raw["metadata"].get("ownerReferences", ())
    return next((o["uid"] for o in owners if o.get("controller") and o["kind"] == KIND), None)


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """A pod, the fleet that its label names, and the uid that owns it."""

    fleet: Key
    owner: str | None
    view: PodView


@dataclass(frozen=True, slots=True)
class ChildView:
    """Another object of a fleet."""

    fleet: Key
    owner: str | None


@dataclass(frozen=True, slots=True)
class RevisionView:
    """A ControllerRevision."""

    fleet: Key
    owner: str | None
    revision: str
    spec_hash: str
    created_at: float


def owned_pod(raw: Object) -> OwnedPod:
    return OwnedPod(_fleet(raw), owner_uid(raw), pod_view(raw))


def child_view(raw: Object) -> ChildView:
    return ChildView(_fleet(raw), owner_uid(raw))


def revision_view(raw: Object) -> RevisionView:
    labels = raw["metadata"]["labels"]
    created_at = seconds(raw["metadata"]["creationTimestamp"]) or 0.0
    return RevisionView(_fleet(raw), owner_uid(raw), labels.get(REVISION_LABEL, ""), labels.get(SPEC_HASH_LABEL, ""), created_at)


def _fleet(raw: Object) -> Key:
    return Key(raw["metadata"]["namespace"], raw["metadata"]["labels"][DEPLOYMENT_LABEL])


# -- resources -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parsed:
    """A DecoderDeployment as it was read."""

    resource: DecoderDeployment
    version: int
    deleted: bool
    replicas_writer: ReplicasWriter | None
    error: str | None = None  # why its spec could not be read; the resource then has its last good spec or a stand-in


_STAND_IN = Spec(model=ModelSource(uri="file:///unreadable"), replicas=0)


def parse_resource(raw: Object, last: DecoderDeployment | None = None) -> Parsed:
    """Reads a resource; `last` is what was read of it before. A spec that the types refuse becomes `error`, never an exception."""
    metadata = _metadata(raw["metadata"])
    error = None
    try:
        spec = Spec.model_validate(raw.get("spec"))
    except ValidationError as problem:
        error = "; ".join(f"spec.{line}" for line in explain(problem, Spec))
        spec = last.spec if last is not None and last.metadata.uid == metadata.uid else _STAND_IN
    try:
        status = Status.model_validate(raw["status"]) if raw.get("status") else None
    except ValidationError:
        status = None  # of another version of the operator; this one writes its own
    resource = DecoderDeployment(metadata=metadata, spec=spec, status=status)
    version = int(metadata.resource_version)
    return Parsed(resource, version, metadata.deletion_timestamp is not None, replicas_writer(raw["metadata"]), error)


def _metadata(raw: Object) -> Metadata:
    return Metadata(
        name=raw["name"],
        namespace=raw["namespace"],
        uid=raw["uid"],
        generation=raw.get("generation", 1),
        resource_version=raw["resourceVersion"],
        deletion_timestamp=raw.get("deletionTimestamp"),
        annotations=raw.get("annotations") or {},
        labels=raw.get("labels") or {},
    )


def replicas_writer(metadata: Object) -> ReplicasWriter | None:
    """Who wrote spec.replicas last, from managedFields; None where nobody owns it."""
    # The scale subresource of a custom resource keeps no time, and whoever wrote through it took the field from the others.
    owners = [
        (entry.get("subresource") == "scale", seconds(entry.get("time")), entry.get("manager", ""))
        for entry in metadata.get("managedFields", ())
        if "f:replicas" in _spec_fields(entry) and entry.get("subresource") != "status"
    ]
    if not owners:
        return None
    _, at, manager = max(owners, key=lambda owner: (owner[0], owner[1] or 0.0))
    return ReplicasWriter(manager, at, ours=manager == FIELD_MANAGER)


def _spec_fields(entry: Object) -> dict[str, Any]:
    fields: dict[str, Any] = entry.get("fieldsV1", {}).get("f:spec", {})
    return fields
