"""An API server that answers badly, or not at all, and what a quiet operator asks of a good one."""

from __future__ import annotations

import asyncio

import pytest
from fake_nodes import fake_nodes
from harness import operator
from kube import Kube, eventually, fleet
from proxy import Fault, Proxy, Request
from test_fleet import ready


def to(verb: str, end: str) -> object:
    return lambda request: request.verb == verb and request.path.endswith(end)


def on_pod(verb: str):
    return lambda request: request.verb == verb and "/pods/small-" in request.path


FAULTS = {
    "a conflict on each pod's label": Fault(on_pod("PATCH"), 409, times=2),
    "an error before a pod is made": Fault(to("POST", "/pods"), 500, times=2),
    "an error after a pod was made": Fault(to("POST", "/pods"), 500, times=2, after=True),
    "too many requests": Fault(to("POST", "/pods"), 429, times=2),
    "a hanging create that was done": Fault(to("POST", "/pods"), None, after=True),
    "a hanging status": Fault(to("PATCH", "/status"), None, times=1),
    "an error of the first list": Fault(to("LIST", "/pods"), 500, times=2),
    "a list that expires": Fault(to("LIST", "/pods"), 410, times=2),
    "a watch that is too old": Fault(to("WATCH", "/pods"), 410, times=2),
    "a watch that is refused": Fault(to("WATCH", "/pods"), 429, times=1),
    "a watch that hangs": Fault(to("WATCH", "/pods"), None, times=1),
    "resources that cannot be watched": Fault(to("WATCH", "/decoderdeployments"), 500, times=3),
    "a resource watch that is too old": Fault(to("WATCH", "/decoderdeployments"), 410, times=2),
    "a Secret that was made unheard": Fault(to("POST", "/secrets"), 500, after=True),
    "a revision that was made unheard": Fault(to("POST", "/controllerrevisions"), 500, after=True),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_a_fault_passes(kube: Kube, api_proxy: Proxy, fault: Fault) -> None:
    fault = Fault(fault.matches, fault.status, fault.times, fault.after)
    api_proxy.faults.append(fault)
    async with fake_nodes(kube.api, kube.namespace), operator(api_proxy.url, kube.namespace, timeout=1.0, idle=2.0):
        await kube.create("dd", fleet("small", replicas=2))
        await ready(kube, "small", 2)

        async def met() -> bool:
            return fault.hits == fault.times

        await eventually(met, "the fault is met, without which this proves nothing")
        await ready(kube, "small", 2)
        assert len(await kube.pods("small")) == 2
        assert api_proxy.created("pods") == 2


async def test_an_outage_hides_nothing(kube: Kube, api_proxy: Proxy) -> None:
    """What was created, scaled and deleted while the API server could not be reached."""
    async with fake_nodes(kube.api, kube.namespace), operator(api_proxy.url, kube.namespace, timeout=1.0, idle=2.0) as running:
        for name in ("kept", "gone"):
            await kube.create("dd", fleet(name))
            await ready(kube, name, 1)
        async with api_proxy.outage():
            await kube.delete("dd", "gone")
            for pod in await kube.pods("gone"):
                await kube.delete("pods", pod["metadata"]["name"])
            await kube.merge("dd", "kept", {"spec": {"replicas": 2}}, "scale")
            (pod,) = await kube.pods("kept")
            await kube.delete("pods", pod["metadata"]["name"])
            await kube.create("dd", fleet("new"))
            await asyncio.sleep(3.0)  # several backoffs long
        await ready(kube, "kept", 2)
        await ready(kube, "new", 1)

        async def forgotten() -> bool:
            keys = running.backend.keys()
            return sorted(key.name for key in keys) == ["kept", "new"]

        await eventually(forgotten, "the deleted resource is forgotten")
        assert await kube.pods("gone") == []


async def test_a_quiet_fleet_asks_for_nothing(kube: Kube, api_proxy: Proxy) -> None:
    async with fake_nodes(kube.api, kube.namespace), operator(api_proxy.url, kube.namespace) as running:
        await kube.create("dd", fleet("small", replicas=3))
        await ready(kube, "small", 3)

        async def quiet() -> bool:
            before = len(api_proxy.passed)
            await asyncio.sleep(2.0)
            return len(api_proxy.passed) == before

        await eventually(quiet, "no request for 2 s")
        began, reconciles = len(api_proxy.passed), running.controller.reconciles
        await asyncio.sleep(12.0)  # longer than the interval of status and ledger
        requests = api_proxy.passed[began:]
        assert running.controller.reconciles > reconciles, "it looked"
        assert not [r for r in requests if r.verb in ("LIST", "WATCH", "GET", "POST", "DELETE")], requests
        assert len(requests) <= 2, requests
        assert {_kind(r) for r in requests} <= {"status", "configmaps"}


def _kind(request: Request) -> str:
    return "status" if request.path.endswith("/status") else request.path.split("/")[-2]
