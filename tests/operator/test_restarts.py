"""The operator killed between any two writes: the next one converges to the same state, with no pod too many."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from control_plane import ControlPlane
from fake_nodes import FakeNodes, fake_nodes
from harness import configuration, operator, process
from kube import CHILDREN, Kube, eventually, fleet
from proxy import proxy

from decodefleet_operator.cluster.client import ApiClient

NAME = "small"
MORE_WRITES_THAN_ANY_RUN = 100
AT_ONCE = 4


@asynccontextmanager
async def world(plane: ControlPlane) -> AsyncIterator[tuple[Kube, FakeNodes]]:
    """A namespace with nodes."""
    name = f"t-{secrets.token_hex(4)}"
    async with ApiClient(configuration(plane.url, plane.token)) as api:
        await api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        async with fake_nodes(api, name) as nodes:
            yield Kube(api, name), nodes
        for pod in await Kube(api, name).list("pods"):
            await Kube(api, name).delete("pods", pod["metadata"]["name"])
        await api._send("DELETE", f"/api/v1/namespaces/{name}", {}, None, None)


async def story(kube: Kube) -> None:
    """What happens to the fleet, whoever operates it: created with two replicas, scaled in to one."""
    await kube.create("dd", fleet(NAME, replicas=2))
    await settled(kube, 2)
    await kube.merge("dd", NAME, {"spec": {"replicas": 1}}, "scale")
    await settled(kube, 1)


async def settled(kube: Kube, replicas: int) -> None:
    async def check() -> bool:
        status = await kube.status(NAME)
        counts = {status.get("replicas"), status.get("readyReplicas"), status.get("updatedReplicas"), len(await kube.pods(NAME))}
        assert counts == {replicas}, counts
        resource = await kube.get("dd", NAME)
        assert status["observedGeneration"] == resource["metadata"]["generation"]
        conditions = {c["type"]: c["status"] for c in status["conditions"]}
        assert (conditions["Ready"], conditions["Progressing"]) == ("True", "False"), conditions
        return True

    await eventually(check, f"{replicas} replicas")


async def picture(kube: Kube) -> dict[str, object]:
    """The final state without what differs from run to run."""
    status = await kube.status(NAME)
    (pod,) = await kube.pods(NAME)
    names = {kind: sorted(o["metadata"]["name"] for o in await kube.list(kind)) for kind in CHILDREN if kind not in ("pods", "configmaps")}
    return {
        "children": names | {"configmaps": [n for n in ["small-sla"] if await kube.find("configmaps", n)]},
        "conditions": [(c["type"], c["status"], c["reason"]) for c in status["conditions"]],
        "counts": [status[field] for field in ("replicas", "readyReplicas", "updatedReplicas", "observedGeneration")],
        "revision": status["revision"],
        "labels": pod["metadata"]["labels"],
        "annotations": pod["metadata"].get("annotations"),
    }


async def killed_after(plane: ControlPlane, writes: int, expected: dict[str, object]) -> bool:
    """Tells the story to an operator that dies after so many writes, and to its successor. False: the first one needed no more.

    It dies: the answer to its last write and everything after it is lost, and so is all that was in memory.
    """
    async with world(plane) as (kube, _), proxy(plane.url, plane.token) as through:
        through.writes_left = writes
        told = asyncio.create_task(story(kube))
        async with operator(through.url, kube.namespace):
            cut = asyncio.create_task(through.spent.wait())
            await asyncio.wait({told, cut}, return_when=asyncio.FIRST_COMPLETED)
            cut.cancel()
        if not through.spent.is_set():
            await told
            return False
        through.writes_left = None
        through.spent.clear()
        async with operator(through.url, kube.namespace):
            await told

            async def same() -> bool:
                assert await picture(kube) == expected
                return True

            await eventually(same, f"the same state, killed after write {writes}")
        assert through.created("pods") == 2, f"killed after write {writes}, it made a pod too many"
        return True


@pytest.mark.timeout(1200)
async def test_killed_after_any_write_and_started_again(control_plane: ControlPlane) -> None:
    async with world(control_plane) as (kube, _), proxy(control_plane.url, control_plane.token) as through:
        async with operator(through.url, kube.namespace):
            await story(kube)
            await kube.until_condition(NAME, "MetricsFresh", "True")
        expected = await picture(kube)
        assert through.created("pods") == 2

    killed = 0
    for first in range(1, MORE_WRITES_THAN_ANY_RUN, AT_ONCE):
        outcomes = await asyncio.gather(*(killed_after(control_plane, first + n, expected) for n in range(AT_ONCE)))
        killed += sum(outcomes)
        if not all(outcomes):
            break
    print(f"killed after each of {killed} writes")
    assert killed >= 12, "the story takes more writes than that"


@pytest.mark.parametrize("writes", [4, 9])
async def test_a_process_killed_by_the_system_and_started_again(control_plane: ControlPlane, tmp_path: Path, writes: int) -> None:
    async with world(control_plane) as (kube, _), proxy(control_plane.url, control_plane.token) as through:
        through.writes_left = writes
        kubeconfig = control_plane.write_kubeconfig(tmp_path / "kubeconfig", through.url)
        told = asyncio.create_task(story(kube))
        with process(kubeconfig, kube.namespace, tmp_path / "first.log"):
            await asyncio.wait_for(through.spent.wait(), 60)
        through.writes_left = None
        through.spent.clear()
        # Its own lease: that one waits for a dead leader's lease to end is another test's.
        with process(kubeconfig, kube.namespace, tmp_path / "second.log", "--lease-name", "second") as second:
            await told
            assert second.poll() is None, (tmp_path / "second.log").read_text()[-2000:]
        assert through.created("pods") == 2
