"""Raw objects, reduced to what decisions need."""

from __future__ import annotations

from typing import Any

import pytest
from kube import Kube, fleet, path

from decodefleet_operator.cluster.client import FIELD_MANAGER, MERGE, Object
from decodefleet_operator.cluster.views import parse_resource, pod_view, replicas_writer, seconds

CREATED = "2026-01-02T03:04:05Z"


def raw_pod(status: Object | None = None, **metadata: Any) -> Object:
    labels = {"decodefleet.dev/deployment": "small", "decodefleet.dev/revision": "abc"}
    own = {"name": "small-abc-0", "namespace": "n", "uid": "u", "resourceVersion": "7", "creationTimestamp": CREATED, "labels": labels}
    return {"metadata": own | metadata, "spec": {"containers": [{"name": "agent"}]}, "status": status or {}}


def condition(type_: str, status: str, **more: str) -> Object:
    return {"type": type_, "status": status, "lastTransitionTime": "2026-01-02T03:05:05Z"} | more


def test_a_pod_of_which_nothing_is_known_yet() -> None:
    view = pod_view(raw_pod())
    assert (view.name, view.revision, view.phase, view.created_at) == ("small-abc-0", "abc", "Pending", seconds(CREATED))
    assert not (view.ready or view.serving or view.leaving or view.lost)
    assert view.address is view.node is view.started_at is view.ready_at is view.unschedulable_since is view.problem is None


def test_a_pod_that_no_node_takes() -> None:
    view = pod_view(raw_pod({"conditions": [condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")]}))
    assert view.unschedulable_since == (seconds(CREATED) or 0) + 60
    assert view.scheduled_at is None
    assert view.problem == "0/3 nodes"


def test_a_pod_that_serves() -> None:
    container = {"name": "agent", "restartCount": 1, "state": {"running": {"startedAt": CREATED}}}
    conditions = [condition("Ready", "True"), condition("PodScheduled", "True")]
    status = {"phase": "Running", "podIP": "10.0.0.7", "conditions": conditions, "containerStatuses": [container]}
    raw = raw_pod(status)
    raw["metadata"]["labels"]["decodefleet.dev/serving"] = "true"
    view = pod_view(raw)
    assert (view.ready, view.serving, view.address, view.restarts) == (True, True, "10.0.0.7", 1)
    assert view.ready_at == view.scheduled_at == (seconds(CREATED) or 0) + 60
    assert view.started_at == seconds(CREATED)


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, None),
        ({"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}, "ErrImagePull: no such image"),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "model not found\n"}},
            },
            "CrashLoopBackOff: back-off 10s; exit code 1: model not found",
        ),
        ({"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}, "exit code 137: OOMKilled"),
        ({"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}, None),
    ],
)
def test_what_ails_a_pod_is_told_to_a_person(container: Object, said: str | None) -> None:
    assert pod_view(raw_pod({"containerStatuses": [{"name": "agent"} | container]})).problem == said


def test_leaving_pods_are_no_supply() -> None:
    assert pod_view(raw_pod(annotations={"decodefleet.dev/draining-since": CREATED})).draining_since == seconds(CREATED)
    assert pod_view(raw_pod(annotations={"decodefleet.dev/draining-since": "garbage"})).leaving
    assert pod_view(raw_pod(deletionTimestamp=CREATED)).leaving
    assert pod_view(raw_pod({"phase": "Failed"})).leaving
    assert pod_view(raw_pod({"reason": "NodeLost"})).lost


def raw_resource(spec: Object, generation: int = 1) -> Object:
    own = {"name": "small", "namespace": "n", "uid": "u", "resourceVersion": "9", "generation": generation}
    return {"metadata": own, "spec": spec}


def test_a_spec_that_cannot_be_read_keeps_its_last_good_form() -> None:
    good = parse_resource(raw_resource({"model": {"uri": "file:///m"}, "replicas": 3}))
    assert good.error is None
    spec = {"model": {"uri": "file:///m"}, "sla": {"window": "soon"}}
    bad = parse_resource(raw_resource(spec, generation=2), good.resource)
    assert bad.error is not None
    assert "spec.sla.window" in bad.error
    assert bad.resource.spec == good.resource.spec
    assert bad.resource.metadata.generation == 2
    assert parse_resource(raw_resource(spec)).resource.spec.replicas == 0, "never seen whole: nothing is wanted"


def test_a_status_that_cannot_be_read_is_written_anew() -> None:
    raw = raw_resource({"model": {"uri": "file:///m"}}) | {"status": {"replicas": "many"}}
    parsed = parse_resource(raw)
    assert (parsed.resource.status, parsed.error) == (None, None)


async def test_who_wrote_the_replica_count(kube: Kube) -> None:
    await kube.create("dd", fleet("small"))
    for manager, ours in (("kubectl", False), (FIELD_MANAGER, True), ("hpa", False)):
        replicas = {"kubectl": 2, FIELD_MANAGER: 3, "hpa": 4}[manager]
        body = {"spec": {"replicas": replicas}}
        await kube.api._send("PATCH", path("dd", kube.namespace, "small", "scale"), {"fieldManager": manager}, body, MERGE)
        resource = await kube.get("dd", "small")
        writer = replicas_writer(resource["metadata"])
        assert writer is not None
        assert (writer.manager, writer.ours) == (manager, ours)
    await kube.merge("dd", "small", {"spec": {"suspend": True}})
    writer = replicas_writer((await kube.get("dd", "small"))["metadata"])
    assert writer is not None and writer.manager == "hpa", "another field is another matter"
