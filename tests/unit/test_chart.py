"""The chart as Helm renders it: least privilege, the restricted profile, closed values. Needs helm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "decodefleet"
HELM = shutil.which("helm", path=os.pathsep.join(filter(None, (os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH")))))
PLACEMENTS = {"a100": {"resource": "nvidia.com/gpu", "nodeSelector": {"class": "a100"}, "hourlyPrice": 2.5}}

pytestmark = pytest.mark.skipif(HELM is None, reason="helm neither in KUBEBUILDER_ASSETS nor on PATH")


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    assert HELM
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60)


def render(**values: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of a release `fleet` in the namespace `ml`, by kind and name."""
    sets = [part for name, value in values.items() for part in ("--set-json", f"{name.replace('_', '.')}={json.dumps(value)}")]
    done = helm("template", "fleet", str(CHART), "--namespace", "ml", *sets)
    assert done.returncode == 0, done.stderr
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(done.stdout) if o}


def kinds(objects: dict[tuple[str, str], Any]) -> set[str]:
    return {kind for kind, _ in objects}


def operator(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = objects["Deployment", "fleet-decodefleet"]["spec"]["template"]["spec"]
    return pod


def test_lint() -> None:
    assert helm("lint", "--strict", str(CHART)).returncode == 0


def test_namespaced_by_default() -> None:
    objects = render()
    assert not {kind for kind in kinds(objects) if kind.startswith("Cluster")}
    assert all(o["metadata"]["namespace"] == "ml" for (kind, _), o in objects.items() if kind != "CustomResourceDefinition")
    assert "--namespace=ml" in operator(objects)["containers"][0]["args"]


def test_cluster_wide_only_when_asked_for() -> None:
    objects = render(clusterWide=True)
    assert {"ClusterRole", "ClusterRoleBinding"} <= kinds(objects)
    assert "--all-namespaces" in operator(objects)["containers"][0]["args"]
    role = objects["Role", "fleet-decodefleet-leader"]
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {"leases"}


@pytest.mark.parametrize("cluster_wide", [False, True])
def test_least_privilege(cluster_wide: bool) -> None:
    objects = render(clusterWide=cluster_wide)
    rules = [rule for (kind, _), o in objects.items() if kind in ("Role", "ClusterRole") for rule in o["rules"]]
    assert rules
    for rule in rules:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) <= {"get", "create", "patch"}, "reading a token by its name is enough"
        assert not {"pods/exec", "nodes", "customresourcedefinitions"} & set(rule["resources"])


def test_operator_meets_the_restricted_profile() -> None:
    pod = operator(render(placements=PLACEMENTS))
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert not any("hostPath" in volume for volume in pod["volumes"])


def test_placements_reach_the_operator() -> None:
    objects = render(placements=PLACEMENTS)
    assert yaml.safe_load(objects["ConfigMap", "fleet-decodefleet-placements"]["data"]["placements.yaml"]) == PLACEMENTS
    container = operator(objects)["containers"][0]
    folder = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "placements")
    assert f"--placements={folder}/placements.yaml" in container["args"]
    assert not any("placements" in argument for argument in operator(render())["containers"][0]["args"])


def test_images() -> None:
    agent = {"repository": "r.example/agent", "pullPolicy": "Never"}
    objects = render(image={"repository": "r.example:5000/op", "tag": "1"}, agent_image=agent)
    container = operator(objects)["containers"][0]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container["image"] == "r.example:5000/op:1"
    assert {f"--agent-image=r.example/agent:{version}", "--agent-image-pull-policy=Never"} <= set(container["args"])


def test_uninstall_keeps_the_type_and_nothing_else() -> None:
    kept = {key for key, o in render().items() if o["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"}
    assert kept == {("CustomResourceDefinition", "decoderdeployments.decodefleet.dev")}
    assert "CustomResourceDefinition" not in kinds(render(crds_install=False))


@pytest.mark.parametrize("value", ["replica=2", "replicas=-1", "image.pullPolicy=Sometimes", "placements.a100.price=1", "resources.cpu=1"])
def test_values_are_closed(value: str) -> None:
    done = helm("template", "fleet", str(CHART), "--set", value)
    assert done.returncode != 0 and "schema" in done.stderr
