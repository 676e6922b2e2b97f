"""The objects that belong to a fleet, beside its pods, as they are sent to the API server."""

from __future__ import annotations

import base64
import uuid
from datetime import UTC, datetime
from typing import Any

from decodefleet_operator.api import API_VERSION, KIND, DecoderDeployment, Status
from decodefleet_operator.cluster.client import Object, object_path
from decodefleet_operator.observation import Key
from decodefleet_operator.planning import Event
from decodefleet_operator.render import (
    AGENT_LABELS,
    DEPLOYMENT_LABEL,
    DRAINING_ANNOTATION,
    REVISION_LABEL,
    SERVING_LABEL,
    SERVING_PORT,
    SPEC_HASH_LABEL,
    TOKEN_KEY,
)

MANAGED_BY = {"app.kubernetes.io/managed-by": "decodefleet"}
SELECTOR = "app.kubernetes.io/managed-by=decodefleet," + DEPLOYMENT_LABEL
LEDGER_KEY = "ledger"


def control_secret_name(name: str) -> str:
    return f"{name}-control"


def ledger_name(name: str) -> str:
    return f"{name}-sla"


def revision_name(name: str, revision: str) -> str:
    return f"{name}-{revision}"


def endpoint(key: Key) -> str:
    """Where clients inside the cluster connect; the Service is headless, so they see each serving pod."""
    return f"dns:///{key.name}.{key.namespace}.svc:{SERVING_PORT}"


def labels(name: str) -> dict[str, str]:
    """Of every child."""
    return MANAGED_BY | {DEPLOYMENT_LABEL: name}


def metadata(resource: DecoderDeployment, name: str, **more: Any) -> Object:
    """Of a child: owned, so that it goes with the resource. No blockOwnerDeletion, which may need more rights than we have."""
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": resource.metadata.name, "uid": resource.metadata.uid, "controller": True}
    own = {"name": name, "namespace": resource.metadata.namespace, "labels": labels(resource.metadata.name), "ownerReferences": [owner]}
    return own | more


def service(resource: DecoderDeployment) -> Object:
    """Headless: its DNS name has the pods that serve, for client-side balancing."""
    name = resource.metadata.name
    ports = [{"name": "grpc", "port": SERVING_PORT, "targetPort": "serving", "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"}]
    selector = {DEPLOYMENT_LABEL: name, SERVING_LABEL: "true"}
    body = {"clusterIP": "None", "selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(resource, name), "spec": body}


def disruption_budget(resource: DecoderDeployment) -> Object:
    """Voluntary disruptions take one pod at a time."""
    name = resource.metadata.name
    body = {"maxUnavailable": 1, "selector": {"matchLabels": {DEPLOYMENT_LABEL: name}}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata(resource, name), "spec": body}


def control_secret(resource: DecoderDeployment, token: str) -> Object:
    data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
    own = metadata(resource, control_secret_name(resource.metadata.name))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": own, "type": "Opaque", "data": data}


def token_of(secret: Object) -> str | None:
    """The fleet's token; None where the Secret has lost it."""
    data = (secret.get("data") or {}).get(TOKEN_KEY)
    return base64.b64decode(data).decode().strip() or None if data else None


def ledger_map(resource: DecoderDeployment, text: str) -> Object:
    own = metadata(resource, ledger_name(resource.metadata.name))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": own, "data": {LEDGER_KEY: text}}


def controller_revision(resource: DecoderDeployment, revision: str, spec_hash: str, data: Object) -> Object:
    """Keeps what the pods of a revision are made of."""
    own = metadata(resource, revision_name(resource.metadata.name, revision))
    own["labels"] |= {REVISION_LABEL: revision, SPEC_HASH_LABEL: spec_hash}
    number = max(resource.metadata.generation, 1)
    return {"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": own, "revision": number, "data": data}


def pod(resource: DecoderDeployment, name: str, revision: str, rendered: Object) -> Object:
    """A pod to POST, of what render.finish() returned."""
    template = rendered["metadata"]
    own_labels = template["labels"] | labels(resource.metadata.name) | AGENT_LABELS | {REVISION_LABEL: revision}
    own = metadata(resource, name, labels=own_labels, annotations=template["annotations"])
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": rendered["spec"]}


def serve_changes() -> Object:
    """Metadata that turns the serving label on."""
    return {"labels": {SERVING_LABEL: "true"}}


def drain_changes(now: float) -> Object:
    """Metadata that turns the serving label off and the draining annotation on, in one write."""
    return {"labels": {SERVING_LABEL: None}, "annotations": {DRAINING_ANNOTATION: timestamp(now)}}


def status(resource: DecoderDeployment, wanted: Status) -> Object:
    """The whole status for server-side apply; the uid refuses another resource of the same name."""
    own = {"name": resource.metadata.name, "namespace": resource.metadata.namespace, "uid": resource.metadata.uid}
    body = wanted.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": own, "status": body}


def event(resource: DecoderDeployment, what: Event, now: float, reporter: str) -> Object:
    namespace, name = resource.metadata.namespace, resource.metadata.name
    regarding = {"apiVersion": API_VERSION, "kind": KIND, "namespace": namespace, "name": name, "uid": resource.metadata.uid}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": namespace, "name": f"{name}.{uuid.uuid4().hex[:16]}"},
        "regarding": regarding,
        "type": what.type,
        "reason": what.reason,
        "action": "Reconcile",
        "note": what.message[:1024],
        "eventTime": timestamp(now, micro=True),
        "reportingController": "decodefleet.dev/operator",
        "reportingInstance": reporter[:128],
    }


def timestamp(at: float, micro: bool = False) -> str:
    """RFC 3339, as Kubernetes writes it."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds" if micro else "seconds")
    return text.replace("+00:00", "Z")


def path_of(body: Object, plural: str, subresource: str | None = None) -> str:
    """Where the object lies."""
    return object_path(body["apiVersion"], plural, body["metadata"]["namespace"], body["metadata"]["name"], subresource)
