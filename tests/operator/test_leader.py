"""Two operators: one writes, the other takes over."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

from control_plane import ControlPlane
from fake_nodes import fake_nodes
from harness import process
from kube import Kube, eventually, fleet
from test_fleet import ready

LEASE = "decodefleet-operator"


async def holder(kube: Kube) -> str:
    lease = await kube.find("leases", LEASE)
    return (lease or {}).get("spec", {}).get("holderIdentity") or ""


async def another_holder(kube: Kube, than: str) -> str:
    async def check() -> str | None:
        now = await holder(kube)
        return now if now and now != than else None

    return str(await eventually(check, f"another leader than {than!r}"))


async def ended(process: subprocess.Popen[bytes]) -> int:
    async def check() -> bool:
        return process.poll() is not None

    await eventually(check, "the process ended")
    return int(process.returncode)


async def test_one_leads_and_the_other_takes_over(control_plane: ControlPlane, kube: Kube, tmp_path: Path) -> None:
    start = lambda name: process(control_plane.kubeconfig, kube.namespace, tmp_path / f"{name}.log")  # noqa: E731
    async with fake_nodes(kube.api, kube.namespace) as nodes:
        with start("first") as first:
            leader = await another_holder(kube, "")
            with start("second") as second:
                await kube.create("dd", fleet("small"))
                await ready(kube, "small", 1)
                assert await holder(kube) == leader

                first.send_signal(signal.SIGTERM)
                assert await ended(first) == 0
                leader = await another_holder(kube, leader)

                await kube.merge("dd", "small", {"spec": {"replicas": 2}}, "scale")
                await ready(kube, "small", 2)
                with start("third") as third:
                    await asyncio.sleep(3.0)  # it has seen the lease
                    second.kill()  # the lease is not released
                    await kube.merge("dd", "small", {"spec": {"replicas": 3}}, "scale")
                    await another_holder(kube, leader)
                    await ready(kube, "small", 3)
                    assert third.poll() is None
        assert len(nodes.seen) == 3, "no operator made a pod too many"


async def test_a_lost_lease_ends_the_process(control_plane: ControlPlane, kube: Kube, tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    with process(control_plane.kubeconfig, kube.namespace, log) as running:
        await another_holder(kube, "")
        await kube.merge("leases", LEASE, {"spec": {"holderIdentity": "somebody-else"}})
        assert await ended(running) == 1
        assert "the lease is lost" in log.read_text()
        assert await holder(kube) == "somebody-else"
