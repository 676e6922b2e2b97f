"""What passes between the control loop and agents: samples, Configure, Drain; against real AgentControl servers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from loop_world import TOKEN, A, MemoryBackend, decide, pod, running, until

from decodefleet.v1 import control_pb2 as pb
from decodefleet.v1 import control_pb2_grpc
from decodefleet_operator import controller as module
from decodefleet_operator.agents import AgentClient, Sampler
from decodefleet_operator.api import Status
from decodefleet_operator.observation import Key, Observation, PodView
from decodefleet_operator.planning import Plan, PodRef, RuntimeConfig


class Agent(control_pb2_grpc.AgentControlServicer):
    """AgentControl with a state that the test sets."""

    def __init__(self) -> None:
        self.state = pb.AGENT_STATE_LOADING
        self.configured: list[pb.ConfigureRequest] = []
        self.drained: list[float] = []
        self.hangs = False
        self.asked = 0

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        if ("authorization", f"Bearer {TOKEN}") not in tuple(context.invocation_metadata()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        await self._check(context)
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return pb.GetLoadResponse(instance_id="i", state=self.state, running=3)

    async def Configure(self, request: pb.ConfigureRequest, context: grpc.aio.ServicerContext) -> pb.ConfigureResponse:
        await self._check(context)
        self.configured.append(request)
        return pb.ConfigureResponse(generation=request.generation)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        await self._check(context)
        self.drained.append(request.timeout_seconds)
        return pb.DrainResponse()


@contextlib.asynccontextmanager
async def serving(agent: Agent) -> AsyncIterator[int]:
    server = grpc.aio.server()
    control_pb2_grpc.add_AgentControlServicer_to_server(agent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def with_pods(backend: MemoryBackend, key: Key, *pods: PodView, token: str = TOKEN) -> None:
    backend.resources[key] = dataclasses.replace(backend.resources[key], pods=pods, control_token=token)


async def test_configure_and_drain_reach_the_agents_after_the_writes() -> None:
    agent, backend = Agent(), MemoryBackend(A)
    config = RuntimeConfig(4, (), 9, 33.0)

    def both(observation: Observation, now: float) -> Plan:
        refs = (PodRef("p", "u", "1"),)
        return Plan(Status(), observation.ledger, observation.memory, configure=refs, config=config, drain=refs, revisit_after=1000.0)

    async def before_the_agents(key: Key) -> None:
        assert not agent.drained or backend.count(A) > 1

    backend.on_apply = before_the_agents
    async with serving(agent) as port:
        with_pods(backend, A, pod("p", port))
        async with running(backend, both):
            await until(lambda: bool(agent.drained) and bool(agent.configured))
    assert (agent.configured[0].generation, agent.configured[0].max_waiting, agent.configured[0].drain_timeout_seconds) == (4, 9, 33.0)
    assert agent.drained[0] == 120.0


async def test_an_agent_that_does_not_answer_is_asked_again_soon_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_RETRY", 0.1)
    agent, backend = Agent(), MemoryBackend(A)

    def drain_all(observation: Observation, now: float) -> Plan:
        refs = tuple(PodRef(p.name, p.uid, "1") for p in observation.pods)
        return Plan(Status(), observation.ledger, observation.memory, drain=refs, revisit_after=1000.0)

    async with serving(agent) as port:
        with_pods(backend, A, pod("dead", 1), pod("p", port))
        async with running(backend, drain_all) as controller:
            await until(lambda: len(agent.drained) >= 3)
            assert controller.failures == 0


async def test_a_sample_reaches_the_decision_and_a_change_of_state_wakes_it() -> None:
    agent, backend = Agent(), MemoryBackend(A)
    seen: list[str | None] = []

    def watching(observation: Observation, now: float) -> Plan:
        load = observation.loads.get("p")
        seen.append(load.state if load else None)
        return decide(observation, now)

    async with serving(agent) as port:
        with_pods(backend, A, pod("p", port))
        async with running(backend, watching):
            await until(lambda: "LOADING" in seen)
            agent.state = pb.AGENT_STATE_SERVING
            await until(lambda: "SERVING" in seen)
            count, asked = len(seen), agent.asked
            await until(lambda: agent.asked > asked + 5)
            assert len(seen) <= count + 1, "samples without news wake the controller"


async def test_an_answer_stays_with_its_age_when_the_agent_falls_silent_and_holds_no_other() -> None:
    silent, other, backend = Agent(), Agent(), MemoryBackend(A)
    client = AgentClient(timeout=0.3)
    sampler = Sampler(backend, client)
    async with serving(silent) as one, serving(other) as two:
        with_pods(backend, A, pod("silent", one), pod("other", two), pod("never", 1))
        await sampler.sample()
        before = sampler.loads(A)
        assert before.keys() == {"silent", "other"}
        silent.hangs = True
        began = time.monotonic()
        await sampler.sample()
        assert time.monotonic() - began < 30
        after = sampler.loads(A)
        assert after["silent"] == before["silent"], "an answer that is old is kept as it was"
        assert after["other"].at > before["other"].at
        # Another pod under the same name knows nothing of its predecessor.
        with_pods(backend, A, pod("silent", one, uid="new"), pod("other", two))
        await sampler.sample()
        assert sampler.loads(A).keys() == {"other"}
    await client.close()


async def test_a_wrong_token_is_no_answer() -> None:
    agent, backend = Agent(), MemoryBackend(A)
    client = AgentClient()
    sampler = Sampler(backend, client)
    async with serving(agent) as port:
        with_pods(backend, A, pod("p", port), token="wrong")
        await sampler.sample()
        assert sampler.loads(A) == {}
        assert sampler.demand(A, 30.0, time.time()) is None
    await client.close()


async def test_observers_hear_of_answers_and_of_silence() -> None:
    agent, backend = Agent(), MemoryBackend(A)
    client = AgentClient()
    sampler = Sampler(backend, client)
    heard: dict[str, bool] = {}
    sampler.observers.append(lambda key, view, load: heard.__setitem__(view.name, load is not None))
    async with serving(agent) as port:
        with_pods(backend, A, pod("p", port), pod("dead", 1))
        await sampler.sample()
    await client.close()
    assert heard == {"p": True, "dead": False}
