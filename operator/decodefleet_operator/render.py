"""The pod of a replica, rendered from the spec, and the revision that names the rendering."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from decodefleet.config import AgentConfig
from decodefleet.units import format_duration
from decodefleet_operator.api import Spec

Object = dict[str, Any]

DEPLOYMENT_LABEL = "decodefleet.dev/deployment"
REVISION_LABEL = "decodefleet.dev/revision"
SERVING_LABEL = "decodefleet.dev/serving"
SPEC_HASH_LABEL = "decodefleet.dev/spec-hash"
PLACEMENT_LABEL = "decodefleet.dev/placement"
DRAINING_ANNOTATION = "decodefleet.dev/draining-since"
AGENT_LABELS = {"app.kubernetes.io/name": "decodefleet-agent", "app.kubernetes.io/managed-by": "decodefleet"}

CONTAINER = "agent"
SERVING_PORT, CONTROL_PORT, HTTP_PORT = 50051, 50052, 8080
CONFIG_VARIABLE = "DECODEFLEET_CONFIG"
TOKEN_KEY = "token"

_USER = 65532
_CONTROL_DIRECTORY = "/etc/decodefleet/control"
_MODELS_DIRECTORY = "/models"
_CACHE_DIRECTORY = "/cache"
_CACHE_VARIABLES = {
    "HOME": _CACHE_DIRECTORY,
    "HF_HOME": f"{_CACHE_DIRECTORY}/huggingface",
    "TRITON_CACHE_DIR": f"{_CACHE_DIRECTORY}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{_CACHE_DIRECTORY}/torchinductor",
    "XDG_CACHE_HOME": f"{_CACHE_DIRECTORY}/xdg",
}
_GRACE = 15  # seconds between the end of a drain and SIGKILL
_NODE_LOST_AFTER = 30  # seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """A placement profile of the chart's values: the machines that it names and what a replica asks of them."""

    name: str
    resource_name: str | None = None  # such as nvidia.com/gpu; each replica asks for parallelism.tensor of it
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Object, ...] = ()
    hourly_price: float | None = None


# -- revision --------------------------------------------------------------------------------------------------------------------


def pod_spec_part(spec: Spec) -> Object:
    """The fields that a pod is made of, defaults left out, so that a field that a later version adds changes no hash.

    What Configure tells running agents, and what only the operator uses, is not in it.
    """
    fields: Any = {"image": True, "model": True, "engine": True, "parallelism": True, "resources": {"cpu", "memory"}, "pod_template": True}
    part: Object = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True, include=fields)
    part.get("engine", {}).get("batching", {}).pop("maxWaiting", None)
    return _without_empty(part)


def _without_empty(value: Object) -> Object:
    cleaned = {k: _without_empty(v) if isinstance(v, dict) else v for k, v in value.items()}
    return {k: v for k, v in cleaned.items() if v != {}}


def spec_hash(spec: Spec) -> str:
    """Names the pod-affecting part of a spec, whatever image it resolves to."""
    return _hash(pod_spec_part(spec))


def revision(spec: Spec, image: str) -> str:
    """Names the pods of a spec with the image that it resolved to."""
    return _hash({"spec": pod_spec_part(spec), "image": image})


def _hash(value: Object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:8]


# -- pod -------------------------------------------------------------------------------------------------------------------------


def render(spec: Spec, image: str, control_secret: str, pull_policy: str | None = None) -> Object:
    """Labels, annotations and PodSpec of each replica: what a ControllerRevision stores. finish() makes a pod of it."""
    template = spec.pod_template
    model_uri, model_volumes, model_mounts = _model(spec.model.uri)
    config = AgentConfig(
        model_uri=model_uri,
        engine=spec.engine,
        tensor_parallel=spec.parallelism.tensor,
        cpu=spec.resources.cpu,
        memory=spec.resources.memory,
        serving_port=SERVING_PORT,
        control_port=CONTROL_PORT,
        http_port=HTTP_PORT,
        control_token_file=f"{_CONTROL_DIRECTORY}/{TOKEN_KEY}",
        drain_timeout=format_duration(spec.drain_timeout),
    )
    token = {"key": TOKEN_KEY, "path": TOKEN_KEY}
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "control", "secret": {"secretName": control_secret, "defaultMode": 0o440, "items": [token]}},
        *model_volumes,
    ]
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": _CACHE_DIRECTORY},
        {"name": "control", "mountPath": _CONTROL_DIRECTORY, "readOnly": True},
        *model_mounts,
    ]
    if spec.parallelism.tensor > 1:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    amounts = {name: str(amount) for name, amount in (("cpu", spec.resources.cpu), ("memory", spec.resources.memory)) if amount is not None}
    container: Object = {
        "name": CONTAINER,
        "image": image,
        "env": _environment(config, template.env),
        "ports": [
            {"name": "serving", "containerPort": SERVING_PORT},
            {"name": "control", "containerPort": CONTROL_PORT},
            {"name": "http", "containerPort": HTTP_PORT},
        ],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "startupProbe": _probe("/startupz", period=2, failures=900),
        "readinessProbe": _probe("/readyz", period=2, failures=2),
        "livenessProbe": _probe("/livez", period=10, failures=6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts + template.volume_mounts,
    }
    if policy := template.image_pull_policy or pull_policy:
        container["imagePullPolicy"] = policy
    gone = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _NODE_LOST_AFTER}
        for key in ("not-ready", "unreachable")
    ]
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes + template.volumes,
        "tolerations": gone + template.tolerations,
    }
    optional = {
        "nodeSelector": template.node_selector,
        "affinity": template.affinity,
        "imagePullSecrets": template.image_pull_secrets,
        "serviceAccountName": template.service_account_name,
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
    }
    pod |= {name: value for name, value in optional.items() if value}
    return {"metadata": {"labels": template.labels | AGENT_LABELS, "annotations": dict(template.annotations)}, "spec": pod}


def finish(rendered: Object, spec: Spec, profile: Profile | None = None) -> Object:
    """A pod of the rendering: with the drain time of now and the machines of its placement, neither of which a revision holds."""
    pod: Object = json.loads(json.dumps(rendered))
    body, metadata = pod["spec"], pod["metadata"]
    body["terminationGracePeriodSeconds"] = round(spec.drain_timeout) + _GRACE
    for variable in body["containers"][0]["env"]:
        if variable["name"] == CONFIG_VARIABLE:
            config = json.loads(variable["value"]) | {"drainTimeout": format_duration(spec.drain_timeout)}
            variable["value"] = json.dumps(config)
    if profile is not None:
        metadata["labels"][PLACEMENT_LABEL] = profile.name
        body["nodeSelector"] = body.get("nodeSelector", {}) | profile.node_selector
        body["tolerations"] = body["tolerations"] + list(profile.tolerations)
        if profile.resource_name:
            for amounts in body["containers"][0]["resources"].values():
                amounts[profile.resource_name] = str(spec.parallelism.tensor)
    return pod


def _model(uri: str) -> tuple[str, list[Object], list[Object]]:
    """The URI as the agent sees it, and the volumes and mounts that bring the model there."""
    if not uri.startswith("pvc://"):
        return uri, [], []
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return f"file://{_MODELS_DIRECTORY}/{path}", [volume], [{"name": "models", "mountPath": _MODELS_DIRECTORY, "readOnly": True}]


def _environment(config: AgentConfig, wanted: list[Object]) -> list[Object]:
    """The user's variables go over the cache's, and the configuration over the user's."""
    variables: dict[str, Object] = {name: {"name": name, "value": value} for name, value in _CACHE_VARIABLES.items()}
    variables |= {str(variable.get("name")): variable for variable in wanted}
    text = config.model_dump_json(by_alias=True, exclude_none=True)
    variables[CONFIG_VARIABLE] = {"name": CONFIG_VARIABLE, "value": text}
    return list(variables.values())


def _probe(path: str, period: int, failures: int) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}
