"""The CRD: generated from the API types, applied to a real API server, and refusing what the types refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from kube import Kube, fleet
from pydantic import Field, ValidationError

from decodefleet_operator.api import Model, Spec
from decodefleet_operator.cluster.client import ApiError, Object
from decodefleet_operator.crd import MAX_NAME, RULES, crd, crd_yaml, structural_schema
from decodefleet_operator.reference import reference

ROOT = Path(__file__).parents[2]


def test_the_file_is_what_the_command_prints() -> None:
    assert (ROOT / "crds/decoderdeployments.yaml").read_text() == crd_yaml(), "run `make crd`"


def test_the_reference_is_what_the_command_prints() -> None:
    assert (ROOT / "docs/reference-resource.md").read_text() == reference(), "run `make docs-reference`"


def test_every_field_is_described() -> None:
    def undescribed(path: str, schema: Object) -> list[str]:
        found = [] if schema.get("description") else [path]
        inner = schema.get("items", schema)
        return found + [p for name, child in inner.get("properties", {}).items() for p in undescribed(f"{path}.{name}", child)]

    properties = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    assert undescribed("spec", properties["spec"]) + undescribed("status", properties["status"]) == []


def test_every_rule_is_in_the_schema() -> None:
    text = json.dumps(crd())
    for rules in RULES.values():
        for _, message in rules:
            assert json.dumps(message) in text


class Unbounded(Model):
    text: str = Field(description="Anything.")


class Either(Model):
    value: int | str = Field(description="Anything.")


class Exclusive(Model):
    share: float = Field(gt=0, description="Above 0.")


@pytest.mark.parametrize("model", [Unbounded, Either, Exclusive])
def test_what_has_no_structural_schema_is_an_error_when_generating(model: type[Model]) -> None:
    with pytest.raises(TypeError):
        structural_schema(model)


OBJECTIVE = {"name": "ttft", "metric": "TimeToFirstToken", "threshold": "500ms", "target": "95%"}

MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("more min than max", {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas is more than maxReplicas"),
    ("objective without threshold", {"sla": {"objectives": [OBJECTIVE | {"threshold": None}]}}, "needs a threshold"),
    ("availability with threshold", {"sla": {"objectives": [OBJECTIVE | {"metric": "Availability"}]}}, "Availability takes none"),
    ("two objectives of one name", {"sla": {"objectives": [OBJECTIVE, OBJECTIVE]}}, "Duplicate value"),
    ("a rollout that cannot move", {"rollout": {"maxSurge": 0}}, "maxSurge and maxUnavailable are both 0"),
    ("another scheme", {"model": {"uri": "ftp://x"}}, "spec.model.uri"),
    ("no model", {"model": None}, "spec.model"),
    ("a metric that is none", {"sla": {"objectives": [OBJECTIVE | {"metric": "Speed"}]}}, "TimeToFirstToken"),
    ("a duration without unit", {"sla": {"window": "60"}}, "spec.sla.window"),
    ("a share that is no percentage", {"sla": {"objectives": [OBJECTIVE | {"target": "0.95"}]}}, "target"),
    ("a quantity that is none", {"resources": {"cpu": "two"}}, "spec.resources.cpu"),
    ("no cores", {"resources": {"cpu": 0}}, "spec.resources.cpu"),
    ("no memory", {"resources": {"memory": "0.0Gi"}}, "spec.resources.memory"),
    ("a pool of nothing", {"engine": {"kvCache": {"memory": 0}}}, "spec.engine.kvCache.memory"),
    ("a threshold of no time", {"sla": {"objectives": [OBJECTIVE | {"threshold": "0s"}]}}, "write more than 0s"),
    ("a window of no time", {"sla": {"window": "0h0m"}}, "write more than 0s"),
    ("a drain of centuries", {"autoscaling": {"maxReplicas": 2, "scaleDown": {"drainTimeout": "99999d"}}}, "drainTimeout"),
    ("a batch of none", {"engine": {"batching": {"maxBatch": 0}}}, "maxBatch"),
    ("too many replicas", {"replicas": 100_000}, "replicas"),
]


@pytest.mark.parametrize(("spec", "message"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
async def test_the_server_refuses_what_the_types_refuse(kube: Kube, spec: dict[str, Any], message: str) -> None:
    body = fleet("bad", **spec)
    with pytest.raises(ApiError) as refused:
        await kube.create("dd", body)
    assert refused.value.status == 422
    assert message in refused.value.message
    with pytest.raises(ValidationError):
        Spec.model_validate(body["spec"])


@pytest.mark.parametrize("name", ["a" * (MAX_NAME + 1), "1st"])
async def test_names_that_no_service_or_pod_could_have_are_refused(kube: Kube, name: str) -> None:
    with pytest.raises(ApiError) as refused:
        await kube.create("dd", fleet(name))
    assert "names the fleet's Service and pods" in refused.value.message


async def test_the_server_fills_in_the_defaults_of_the_types(kube: Kube) -> None:
    spec = {"model": {"uri": "file:///m"}, "autoscaling": {"maxReplicas": 3}, "sla": {"objectives": [OBJECTIVE]}}
    body = {"apiVersion": "decodefleet.dev/v1alpha1", "kind": "DecoderDeployment", "metadata": {"name": "plain"}, "spec": spec}
    stored = (await kube.create("dd", body))["spec"]
    assert stored["engine"]["batching"]["maxBatch"] == 64
    assert stored["rollout"]["maxSurge"] == 1
    assert stored["autoscaling"]["scaleDown"]["drainTimeout"] == "120s"
    assert Spec.model_validate(stored) == Spec.model_validate(spec)


async def test_no_default_creates_what_means_manual_by_its_absence(kube: Kube, control_plane: ControlPlane) -> None:
    stored = (await kube.create("dd", fleet("plain")))["spec"]
    assert {"autoscaling", "sla", "cost", "image"}.isdisjoint(stored)
