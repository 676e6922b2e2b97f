"""The life of a fleet on a real API server: its children, its scale, its status, and what others do to it."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
from control_plane import ControlPlane, program
from fake_nodes import fake_nodes
from harness import operator
from kube import CHILDREN, Kube, eventually, fleet, path

from decodefleet_operator.render import Profile


async def ready(kube: Kube, name: str, replicas: int) -> None:
    async def check() -> bool:
        status = await kube.status(name)
        assert status.get("readyReplicas") == replicas == status.get("replicas"), status
        return True

    await eventually(check, f"{name} has {replicas} ready replicas")
    await kube.until_condition(name, "Ready", "True")


async def test_a_resource_becomes_a_fleet(control_plane: ControlPlane, kube: Kube) -> None:
    objective = {"name": "ttft", "metric": "TimeToFirstToken", "threshold": "500ms", "target": "95%"}
    async with fake_nodes(kube.api, kube.namespace) as nodes, operator(control_plane.url, kube.namespace, control_plane.token):
        made = await kube.create("dd", fleet("small", replicas=2, sla={"objectives": [objective]}))
        await ready(kube, "small", 2)

        revision = (await kube.status("small"))["revision"]
        pods = await kube.pods("small")
        assert [p["metadata"]["name"] for p in pods] == [f"small-{revision}-0", f"small-{revision}-1"]
        for pod in pods:
            labels = pod["metadata"]["labels"]
            assert labels["decodefleet.dev/revision"] == revision
            assert labels["decodefleet.dev/serving"] == "true"
            assert pod["spec"]["terminationGracePeriodSeconds"] == 135

        token = base64.b64decode((await kube.get("secrets", "small-control"))["data"]["token"]).decode()
        assert all(agent.token == token and len(token) >= 32 for agent in nodes.agents.values())
        generation = made["metadata"]["generation"]
        for agent in nodes.agents.values():
            assert [(o.name, o.threshold_seconds, o.target) for o in agent.configured[-1].objectives] == [("ttft", 0.5, 0.95)]
            assert agent.generation == generation

        service = await kube.get("services", "small")
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"decodefleet.dev/deployment": "small", "decodefleet.dev/serving": "true"}
        assert (await kube.get("pdb", "small"))["spec"]["maxUnavailable"] == 1
        stored = await kube.get("revisions", f"small-{revision}")
        assert stored["data"]["image"] == "localhost/agent:1"
        assert stored["data"]["pod"]["spec"]["containers"][0]["image"] == "localhost/agent:1"
        assert await kube.find("configmaps", "small-sla") is not None

        for kind in CHILDREN:
            mine = await kube.list(kind, "decodefleet.dev/deployment=small")
            assert mine, kind
            for child in mine:
                owner = child["metadata"]["ownerReferences"][0]
                assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True), kind
                assert "finalizers" not in child["metadata"], kind
        resource = await kube.get("dd", "small")
        assert "finalizers" not in resource["metadata"], "neither ours nor kopf's"
        assert "annotations" not in resource["metadata"], "kopf keeps no state on it"
        assert resource["spec"] == made["spec"], "the operator does not write the spec"
        assert resource["status"]["endpoint"] == f"dns:///small.{kube.namespace}.svc:50051"


async def test_scale_subresource_adds_pods_and_drains_before_it_removes_them(control_plane: ControlPlane, kube: Kube) -> None:
    async with fake_nodes(kube.api, kube.namespace) as nodes, operator(control_plane.url, kube.namespace, control_plane.token):
        await kube.create("dd", fleet("small"))
        await ready(kube, "small", 1)
        await kube.merge("dd", "small", {"spec": {"replicas": 3}}, "scale")
        await ready(kube, "small", 3)
        scale = await kube.api.get(path("dd", kube.namespace, "small", "scale"))
        assert scale["status"]["replicas"] == 3
        assert "serving" not in scale["status"]["selector"], "an HPA counts pods whether they serve or not"

        for agent in nodes.agents.values():
            agent.running = 1
        agents = dict(nodes.agents)
        await kube.merge("dd", "small", {"spec": {"replicas": 1}}, "scale")

        async def draining() -> list[str]:
            pods = await kube.pods("small")
            marked = [p["metadata"] for p in pods if "decodefleet.dev/draining-since" in p["metadata"].get("annotations", {})]
            assert len(marked) == 2 and len(pods) == 3, "streams are open, so nothing is deleted"
            assert all("decodefleet.dev/serving" not in m["labels"] for m in marked)
            assert all(agents[m["name"]].drains for m in marked)
            return [m["name"] for m in marked]

        leaving = await eventually(draining, "two pods drain")
        await asyncio.sleep(1.0)  # to see that nothing happens
        assert len(await kube.pods("small")) == 3
        for name in leaving:
            agents[name].running = 0

        async def one() -> bool:
            assert len(await kube.pods("small")) == 1
            return True

        await eventually(one, "the drained pods are gone")
        await ready(kube, "small", 1)
        (left,) = await kube.pods("small")
        assert left["metadata"]["name"] not in leaving
        assert not agents[left["metadata"]["name"]].drains


async def test_deleted_children_come_back(control_plane: ControlPlane, kube: Kube) -> None:
    async with fake_nodes(kube.api, kube.namespace), operator(control_plane.url, kube.namespace, control_plane.token):
        await kube.create("dd", fleet("small"))
        await ready(kube, "small", 1)
        (pod,) = await kube.pods("small")
        token = (await kube.get("secrets", "small-control"))["data"]["token"]
        revision = pod["metadata"]["labels"]["decodefleet.dev/revision"]
        stored = (await kube.get("revisions", f"small-{revision}"))["data"]

        for kind, name in (("services", "small"), ("pdb", "small"), ("revisions", f"small-{revision}"), ("secrets", "small-control")):
            await kube.delete(kind, name)
        await kube.delete("pods", pod["metadata"]["name"])

        async def back() -> bool:
            for kind, name in (("services", "small"), ("pdb", "small"), ("revisions", f"small-{revision}"), ("secrets", "small-control")):
                assert await kube.find(kind, name), f"{kind} {name}"
            return True

        await eventually(back, "all children are there again")
        await ready(kube, "small", 1)
        assert (await kube.pods("small"))[0]["metadata"]["uid"] != pod["metadata"]["uid"]
        assert (await kube.get("secrets", "small-control"))["data"]["token"] == token, "running agents hold it"
        assert (await kube.get("revisions", f"small-{revision}"))["data"] == stored


async def test_pods_of_a_fleet_survive_an_operator_with_another_default_image(control_plane: ControlPlane, kube: Kube) -> None:
    async with fake_nodes(kube.api, kube.namespace) as nodes:
        async with operator(control_plane.url, kube.namespace, control_plane.token):
            await kube.create("dd", fleet("small", replicas=2))
            await ready(kube, "small", 2)
            before = [p["metadata"]["uid"] for p in await kube.pods("small")]
        async with operator(control_plane.url, kube.namespace, control_plane.token, image="localhost/agent:2"):
            await kube.merge("dd", "small", {"spec": {"replicas": 3}}, "scale")
            await ready(kube, "small", 3)
            pods = await kube.pods("small")
            assert [p["metadata"]["uid"] for p in pods][:2] == before
            assert {p["spec"]["containers"][0]["image"] for p in pods} == {"localhost/agent:1"}

            await kube.merge("dd", "small", {"spec": {"model": {"uri": "file:///models/other.gguf"}}})

            async def replaced() -> bool:
                pods = await kube.pods("small")
                assert {p["spec"]["containers"][0]["image"] for p in pods} == {"localhost/agent:2"}, (
                    "a new revision takes the default of now"
                )
                assert len(pods) == 3
                return True

            await eventually(replaced, "the new revision replaced the old one")
            await ready(kube, "small", 3)
            assert len(nodes.seen) == 6, "each pod was replaced once"


async def test_a_quota_refuses_pods_and_the_status_says_so(controller_manager: ControlPlane, kube: Kube) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    await kube.create("quotas", quota)

    async def counted() -> bool:
        return "hard" in (await kube.get("quotas", "few")).get("status", {})

    await eventually(counted, "the quota is in force")
    async with fake_nodes(kube.api, kube.namespace), operator(controller_manager.url, kube.namespace, controller_manager.token):
        await kube.create("dd", fleet("small", replicas=3))
        degraded = await kube.until_condition("small", "Degraded", "True", "PodRejected")
        assert "exceeded quota: few" in degraded["message"]
        assert len(await kube.pods("small")) == 1
        await kube.merge("quotas", "few", {"spec": {"hard": {"pods": "5"}}})
        await ready(kube, "small", 3)
        await kube.until_condition("small", "Degraded", "False")


async def test_fp8_is_refused_on_placements_with_gpus_and_served_on_others(control_plane: ControlPlane, kube: Kube) -> None:
    profiles = {"cpu": Profile("cpu"), "a100": Profile("a100", resource_name="nvidia.com/gpu")}
    fp8 = {"engine": {"precision": {"kvCache": "fp8"}}}
    options = {"token": control_plane.token, "profiles": profiles}
    async with fake_nodes(kube.api, kube.namespace), operator(control_plane.url, kube.namespace, **options):
        await kube.create("dd", fleet("small", **fp8, replicas=1, resources={"placements": [{"profile": "a100"}]}))
        degraded = await kube.until_condition("small", "Degraded", "True", "Unsupported")
        assert "spec.engine.precision.kvCache: fp8 with placement a100" in degraded["message"]
        assert await kube.pods("small") == []
        await kube.merge("dd", "small", {"spec": {"resources": {"placements": [{"profile": "cpu"}]}}})
        await ready(kube, "small", 1)


async def test_deleting_the_resource_leaves_nothing(controller_manager: ControlPlane, kube: Kube) -> None:
    async with fake_nodes(kube.api, kube.namespace), operator(controller_manager.url, kube.namespace, controller_manager.token):
        await kube.create("dd", fleet("small", replicas=2))
        await ready(kube, "small", 2)
        await kube.delete("dd", "small")

        async def gone() -> bool:
            for kind in CHILDREN:
                left = await kube.list(kind, "decodefleet.dev/deployment=small")
                assert not left, [f"{kind}/{o['metadata']['name']}" for o in left]
            return True

        await eventually(gone, "all that the resource owned is gone")
        await asyncio.sleep(1.0)  # to see that nothing comes back
        assert await gone()


async def test_a_namespace_goes_although_no_operator_runs(controller_manager: ControlPlane, kube: Kube) -> None:
    async with fake_nodes(kube.api, kube.namespace):
        async with operator(controller_manager.url, kube.namespace, controller_manager.token):
            await kube.create("dd", fleet("small"))
            await ready(kube, "small", 1)
        await kube.api._send("DELETE", f"/api/v1/namespaces/{kube.namespace}", {}, None, None)

        async def gone() -> bool:
            names = (await kube.api.get("/api/v1/namespaces"))["items"]
            return kube.namespace not in [n["metadata"]["name"] for n in names]

        await eventually(gone, "the namespace is gone")


async def test_kubectl_shows_the_columns(control_plane: ControlPlane, kube: Kube) -> None:
    kubectl = program("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl in KUBEBUILDER_ASSETS or on PATH")

    async def run(*arguments: str) -> str:
        command = [kubectl, "--kubeconfig", str(control_plane.kubeconfig), "-n", kube.namespace, *arguments]
        made = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
        output, _ = await made.communicate()
        assert made.returncode == 0, output.decode()
        return output.decode()

    async with fake_nodes(kube.api, kube.namespace), operator(control_plane.url, kube.namespace, control_plane.token):
        await kube.create("dd", fleet("small"))
        await ready(kube, "small", 1)
        header, row = (await run("get", "dd")).splitlines()
        assert header.split() == ["NAME", "READY", "DESIRED", "SLA", "TOK/S", "COST/1M", "AGE"]
        assert row.split()[:3] == ["small", "1", "1"]
        assert "small" in await run("get", "all"), "category all"
        assert "condition met" in await run("wait", "--for=condition=Ready", "dd/small", "--timeout=60s")
        assert "What the fleet promises" in await run("explain", "dd.spec.sla")
        assert "A request within it is good" in await run("explain", "dd.spec.sla.objectives.threshold")
        assert json.loads(await run("get", "dd", "small", "-o", "json"))["status"]["observedGeneration"] == 1
        await run("scale", "dd/small", "--replicas=2")
        await ready(kube, "small", 2)
