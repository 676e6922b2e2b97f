"""Stands in for nodes: binds pods, reports them Running and Ready, ends deleted ones, and runs an AgentControl server for each."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import itertools
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import grpc

from decodefleet.v1 import control_pb2 as pb
from decodefleet.v1.control_pb2_grpc import AgentControlServicer, add_AgentControlServicer_to_server
from decodefleet_operator.cluster.client import ApiClient, ApiError, Object, object_path

CONTROL_PORT = 50052
# Each agent has a loopback address of its own, also beside another run's.
_FIRST = ipaddress.IPv4Address("127.16.0.0") + secrets.randbelow(2**23)
_addresses = (str(_FIRST + n) for n in itertools.count())


@dataclass
class Agent(AgentControlServicer):
    """What the operator sees of one agent. Tests set its load."""

    address: str
    token: str
    running: int = 0
    waiting: int = 0
    state: pb.AgentState = pb.AGENT_STATE_SERVING
    generation: int = 0
    objectives: list[pb.ObjectiveCount] = field(default_factory=list)
    configured: list[pb.ConfigureRequest] = field(default_factory=list)
    drains: int = 0
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.server = grpc.aio.server()
        add_AgentControlServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"{self.address}:{CONTROL_PORT}")
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)

    async def _admit(self, context: grpc.aio.ServicerContext) -> None:
        if ("authorization", f"Bearer {self.token}") not in (context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        await self._admit(context)
        return pb.GetLoadResponse(
            instance_id=self.instance_id,
            state=self.state,
            generation=self.generation,
            running=self.running,
            waiting=self.waiting,
            objectives=self.objectives,
            warm_up=pb.WarmUp(
                load_seconds=1.0,
                warm_up_seconds=1.0,
                prefill_tokens_per_second=1000.0,
                curve=[pb.WarmUp.CurvePoint(batch=1, step_seconds=0.01, tokens_per_second=100.0)],
            ),
        )

    async def Configure(self, request: pb.ConfigureRequest, context: grpc.aio.ServicerContext) -> pb.ConfigureResponse:
        await self._admit(context)
        self.configured.append(request)
        self.generation = max(self.generation, request.generation)
        return pb.ConfigureResponse(generation=self.generation)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        await self._admit(context)
        self.drains += 1
        self.state = pb.AGENT_STATE_DRAINING
        return pb.DrainResponse(running=self.running, waiting=self.waiting)


class FakeNodes:
    """Follows the pods of one namespace. `agents` has the living ones by pod name; `seen` every pod name that ever was."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._handled: dict[str, str] = {}  # uid -> stage
        self.agents: dict[str, Agent] = {}
        self.seen: list[str] = []
        self.may_start = True  # False keeps pods unscheduled

    async def run(self) -> None:
        try:
            while True:
                for pod in await self._pods():
                    with suppress(ApiError):  # deleted, or changed by somebody else: the next round sees it
                        await self._attend(pod)
                await asyncio.sleep(0.05)
        finally:
            await asyncio.gather(*(agent.stop() for agent in self.agents.values()))

    async def crash(self, name: str) -> None:
        """The pod object goes at once, and its agent with it."""
        await self._end(name)

    async def _pods(self) -> list[Object]:
        answer = await self._api.get(object_path("v1", "pods", self._namespace))
        return [p for p in answer["items"] or [] if p["metadata"]["labels"].get("app.kubernetes.io/name") == "decodefleet-agent"]

    async def _attend(self, pod: Object) -> None:
        metadata = pod["metadata"]
        name, uid = metadata["name"], metadata["uid"]
        if "deletionTimestamp" in metadata:
            await self._end(name)
        elif uid not in self._handled and self.may_start:
            await self._start(pod)
            self._handled[uid] = "ready"
            self.seen.append(name)

    async def _start(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "fake"}}
            await self._api.create(object_path("v1", "pods", self._namespace, name, "binding"), binding)
        secret_name = next(v["secret"]["secretName"] for v in pod["spec"]["volumes"] if v["name"] == "control")
        secret = await self._api.get(object_path("v1", "secrets", self._namespace, secret_name))
        agent = Agent(next(_addresses), base64.b64decode(secret["data"]["token"]).decode())
        if earlier := self.agents.pop(name, None):
            await earlier.stop()
        self.agents[name] = agent  # before it starts, so that it is stopped whatever happens
        await agent.start()
        await self._api.merge(object_path("v1", "pods", self._namespace, name, "status"), {"status": running(agent.address)})

    async def _end(self, name: str) -> None:
        if agent := self.agents.pop(name, None):
            await agent.stop()
        await self._api._send("DELETE", object_path("v1", "pods", self._namespace, name), {"gracePeriodSeconds": "0"}, None, None)


def running(address: str) -> Object:
    """The status of a pod that is Ready."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    types = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    container = {
        "name": "agent",
        "ready": True,
        "restartCount": 0,
        "image": "none",
        "imageID": "",
        "state": {"running": {"startedAt": now}},
    }
    return {
        "phase": "Running",
        "conditions": [{"type": t, "status": "True", "lastTransitionTime": now} for t in types],
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "containerStatuses": [container],
    }


@asynccontextmanager
async def fake_nodes(api: ApiClient, namespace: str) -> AsyncIterator[FakeNodes]:
    nodes = FakeNodes(api, namespace)
    task = asyncio.create_task(nodes.run())
    try:
        yield nodes
        if task.done():
            task.result()  # a failure of the stand-in fails the test
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
