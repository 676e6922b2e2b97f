"""The pod that is rendered, and what changes its revision."""

from __future__ import annotations

import json
from typing import Any

import pytest
from control_plane import ControlPlane
from kube import Kube

from decodefleet.config import AgentConfig
from decodefleet_operator.api import Spec
from decodefleet_operator.cluster.client import ApiError
from decodefleet_operator.render import Profile, finish, render, revision, spec_hash


def spec_of(**fields: Any) -> Spec:
    return Spec.model_validate({"model": {"uri": "file:///models/m.gguf"}, "resources": {"cpu": "2", "memory": "4Gi"}} | fields)


def pod_of(spec: Spec, profile: Profile | None = None) -> dict[str, Any]:
    return finish(render(spec, "agent:1", "small-control"), spec, profile)


def config_of(pod: dict[str, Any]) -> AgentConfig:
    (text,) = [v["value"] for v in pod["spec"]["containers"][0]["env"] if v["name"] == "DECODEFLEET_CONFIG"]
    return AgentConfig.model_validate_json(text)


def test_the_agent_is_told_what_the_spec_says() -> None:
    autoscaling = {"maxReplicas": 2, "scaleDown": {"drainTimeout": "45s"}}
    spec = spec_of(engine={"batching": {"maxBatch": 7}}, autoscaling=autoscaling)
    pod = pod_of(spec)
    config = config_of(pod)
    assert config.model_uri == "file:///models/m.gguf"
    assert config.engine.batching.max_batch == 7
    assert (config.cpu, config.memory, config.drain_timeout) == ("2", "4Gi", "45s")
    ports = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
    assert ports == {"serving": config.serving_port, "control": config.control_port, "http": config.http_port}
    assert pod["spec"]["terminationGracePeriodSeconds"] == 60
    mounts = {m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
    assert config.control_token_file is not None
    assert config.control_token_file.rpartition("/")[0] in mounts
    amounts = {"cpu": "2", "memory": "4Gi"}
    assert pod["spec"]["containers"][0]["resources"] == {"requests": amounts, "limits": amounts}


def test_caches_lie_where_the_root_is_writable() -> None:
    container = pod_of(spec_of())["spec"]["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    env = {v["name"]: v["value"] for v in container["env"]}
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert {"/tmp", "/cache"} <= mounts
    for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        assert env[name].startswith("/cache"), name


def test_a_claim_is_mounted_and_its_path_is_the_agents_file() -> None:
    pod = pod_of(spec_of(model={"uri": "pvc://weights/llama/7b.gguf"}))
    assert config_of(pod).model_uri == "file:///models/llama/7b.gguf"
    claim = {"claimName": "weights", "readOnly": True}
    assert {"name": "models", "persistentVolumeClaim": claim} in pod["spec"]["volumes"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod["spec"]["containers"][0]["volumeMounts"]


def test_the_template_of_the_user_is_merged_and_cannot_replace_the_configuration() -> None:
    template = {
        "labels": {"team": "a", "app.kubernetes.io/name": "mine"},
        "annotations": {"note": "x"},
        "nodeSelector": {"disk": "fast"},
        "env": [{"name": "HF_HOME", "value": "/models/hf"}, {"name": "DECODEFLEET_CONFIG", "value": "{}"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "serviceAccountName": "agents",
        "imagePullPolicy": "Never",
    }
    pod = pod_of(spec_of(podTemplate=template))
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "decodefleet-agent"
    env = {v["name"]: v["value"] for v in pod["spec"]["containers"][0]["env"]}
    assert env["HF_HOME"] == "/models/hf"
    assert config_of(pod).model_uri == "file:///models/m.gguf"
    assert pod["spec"]["serviceAccountName"] == "agents"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["containers"][0]["imagePullPolicy"] == "Never"
    seconds = {t.get("tolerationSeconds") for t in pod["spec"]["tolerations"]}
    assert seconds == {30, None}


def test_a_placement_adds_its_machines_without_another_revision() -> None:
    profile = Profile("a100", "nvidia.com/gpu", {"gpu": "a100"}, ({"key": "nvidia.com/gpu", "operator": "Exists"},))
    spec = spec_of(parallelism={"tensor": 2}, podTemplate={"nodeSelector": {"disk": "fast"}})
    pod = pod_of(spec, profile)
    assert pod["metadata"]["labels"]["decodefleet.dev/placement"] == "a100"
    assert pod["spec"]["nodeSelector"] == {"disk": "fast", "gpu": "a100"}
    for amounts in pod["spec"]["containers"][0]["resources"].values():
        assert amounts["nvidia.com/gpu"] == "2"
    assert any(v["name"] == "shm" and v["emptyDir"]["medium"] == "Memory" for v in pod["spec"]["volumes"])
    assert "nodeSelector" not in pod_of(spec_of())["spec"]


SAME_PODS: list[dict[str, Any]] = [
    {"replicas": 7},
    {"suspend": True},
    {"autoscaling": {"maxReplicas": 3, "scaleDown": {"drainTimeout": "5s"}}},
    {"sla": {"objectives": [{"name": "up", "metric": "Availability", "target": "99%"}]}},
    {"rollout": {"maxSurge": 3}},
    {"cost": {"maxPerHour": 4}},
    {"resources": {"cpu": "2", "memory": "4Gi", "placements": [{"profile": "a100"}]}},
    {"engine": {"batching": {"maxWaiting": 9}}},
    {"engine": {"batching": {"maxBatch": 64}}},
    {"podTemplate": {}},
    {"resources": {"cpu": 2, "memory": "4Gi"}},
]
OTHER_PODS: list[dict[str, Any]] = [
    {"model": {"uri": "file:///models/other.gguf"}},
    {"engine": {"batching": {"maxBatch": 8}}},
    {"engine": {"precision": {"kvCache": "fp32"}}},
    {"parallelism": {"tensor": 2}},
    {"resources": {"cpu": "3", "memory": "4Gi"}},
    {"podTemplate": {"env": [{"name": "A", "value": "1"}]}},
    {"image": "agent:2"},
]


@pytest.mark.parametrize("fields", SAME_PODS, ids=json.dumps)
def test_what_pods_are_not_made_of_restarts_nothing(fields: dict[str, Any]) -> None:
    assert spec_hash(spec_of(**fields)) == spec_hash(spec_of())


@pytest.mark.parametrize("fields", OTHER_PODS, ids=json.dumps)
def test_what_pods_are_made_of_is_another_revision(fields: dict[str, Any]) -> None:
    assert spec_hash(spec_of(**fields)) != spec_hash(spec_of())
    assert revision(spec_of(**fields), "agent:1") != revision(spec_of(), "agent:1")


def test_the_hash_of_a_spec_is_the_same_for_ever() -> None:
    """Another value here restarts every fleet in the world."""
    assert revision(spec_of(), "agent:1") == "2fbfb43f"


async def test_the_restricted_profile_of_kubernetes_admits_the_pod(control_plane: ControlPlane, kube: Kube) -> None:
    enforced = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await kube.api.merge(f"/api/v1/namespaces/{kube.namespace}", enforced)
    for number, spec in enumerate((spec_of(), spec_of(model={"uri": "pvc://weights/m"}, parallelism={"tensor": 2}))):
        pod = pod_of(spec)
        pod["metadata"]["name"] = f"small-{number}"
        await kube.create("pods", {"apiVersion": "v1", "kind": "Pod", **pod})
    with pytest.raises(ApiError, match="violates PodSecurity"):
        pod["metadata"]["name"] = "small-2"
        del pod["spec"]["securityContext"]["runAsNonRoot"]
        await kube.create("pods", {"apiVersion": "v1", "kind": "Pod", **pod})
