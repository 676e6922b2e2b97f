"""The control loop against a small real backend in memory: coalescing, one at a time, errors, and what a decision gets to know."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import grpc
import pytest

from decodefleet.v1 import control_pb2 as pb
from decodefleet.v1 import control_pb2_grpc
from decodefleet_operator import controller as module
from decodefleet_operator.agents import AgentClient, Sampler
from decodefleet_operator.api import DecoderDeployment, Status
from decodefleet_operator.backend import Known
from decodefleet_operator.controller import Controller
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.observation import Key, Memory, Observation, PodView
from decodefleet_operator.planning import Plan, PodRef, RuntimeConfig

Decide = Callable[[Observation, float], Plan]

A, B = Key("default", "a"), Key("default", "b")
TOKEN = "secret"


def resource(name: str, uid: str = "1") -> DecoderDeployment:
    return DecoderDeployment.model_validate({"metadata": {"name": name, "uid": uid}, "spec": {"model": {"uri": "file:///model"}}})


def pod(name: str, port: int = 1, uid: str = "u") -> PodView:
    return PodView(name, uid, "1", "r", 0.0, phase="Running", address="127.0.0.1", control_port=port)


class MemoryBackend:
    """Resources in a dict; apply is what the test says."""

    def __init__(self, *keys: Key) -> None:
        self.resources = {key: Known(resource(key.name), "r", (), Ledger(), TOKEN) for key in keys}
        self.ready = asyncio.Event()
        self.applied: list[tuple[Key, Plan]] = []
        self.on_apply: Callable[[Key], Awaitable[None]] | None = None

    async def run(self, wake: Callable[[Key], None]) -> None:
        await asyncio.Event().wait()

    async def synced(self) -> None:
        await self.ready.wait()

    def keys(self) -> Iterable[Key]:
        return self.resources.keys()

    def known(self, key: Key) -> Known | None:
        return self.resources.get(key)

    async def prepare(self, key: Key) -> None:
        pass

    async def apply(self, key: Key, plan: Plan) -> None:
        self.applied.append((key, plan))
        if self.on_apply is not None:
            await self.on_apply(key)

    def count(self, key: Key) -> int:
        return sum(k == key for k, _ in self.applied)


def decide(observation: Observation, now: float) -> Plan:
    return Plan(observation.resource.status or Status(), observation.ledger, observation.memory, revisit_after=1000.0)


@contextlib.asynccontextmanager
async def running(backend: MemoryBackend, decide: Decide = decide, synced: bool = True) -> AsyncIterator[Controller]:
    client = AgentClient(timeout=2.0)
    controller = Controller(backend, client, Sampler(backend, client, interval=0.05), decide)
    task = asyncio.create_task(controller.run())
    if synced:
        backend.ready.set()
    try:
        yield controller
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


async def settled(backend: MemoryBackend) -> None:
    """Waits long enough for one more reconcile to have happened, if one was due."""
    before = -1
    while before != len(backend.applied):
        before = len(backend.applied)
        await asyncio.sleep(module.SETTLE * 6)


async def test_nothing_is_reconciled_before_the_backend_has_synced() -> None:
    backend = MemoryBackend(A)
    async with running(backend, synced=False) as controller:
        controller.wake(A)
        await asyncio.sleep(module.SETTLE * 4)
        assert backend.applied == []
        backend.ready.set()
        await until(lambda: backend.count(A) == 1)


async def test_every_resource_is_reconciled_once_at_the_start() -> None:
    backend = MemoryBackend(A, B)
    async with running(backend):
        await until(lambda: backend.count(A) == backend.count(B) == 1)


async def test_many_wakes_are_one_reconcile_and_those_that_come_while_it_runs_are_one_more() -> None:
    backend = MemoryBackend(A)
    gate = asyncio.Event()

    async def hold(key: Key) -> None:
        await gate.wait()

    backend.on_apply = hold
    async with running(backend) as controller:
        await until(lambda: backend.count(A) == 1)
        for _ in range(100):
            controller.wake(A)
        await asyncio.sleep(module.SETTLE * 4)
        assert backend.count(A) == 1, "a second reconcile began while the first was running"
        gate.set()
        await settled(backend)
        assert backend.count(A) == 2
        for _ in range(100):
            controller.wake(A)
        await settled(backend)
        assert backend.count(A) == 3


async def test_a_reconcile_that_hangs_holds_no_other_resource_and_is_seen_as_overdue() -> None:
    backend = MemoryBackend(A, B)

    async def hang(key: Key) -> None:
        if key == A:
            await asyncio.Event().wait()

    backend.on_apply = hang
    async with running(backend) as controller:
        await until(lambda: backend.count(A) == backend.count(B) == 1)
        controller.wake(B)
        await until(lambda: backend.count(B) == 2)
        before = controller.oldest_due()
        await until(lambda: controller.oldest_due() > before + 0.2)


async def test_an_error_backs_off_and_neither_a_wake_nor_another_resource_is_in_its_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY", 0.5)
    backend = MemoryBackend(A, B)
    fails = True

    async def fail(key: Key) -> None:
        if key == A and fails:
            raise RuntimeError("the disk is full")

    backend.on_apply = fail
    async with running(backend) as controller:
        await until(lambda: backend.count(A) == backend.count(B) == 1)
        first = time.monotonic()
        for _ in range(10):
            controller.wake(A)
            await asyncio.sleep(0.01)
        controller.wake(B)
        await until(lambda: backend.count(B) == 2)
        await until(lambda: backend.count(A) == 2)
        assert time.monotonic() - first > 0.3, "the wake-ups cut the back-off short"
        assert controller.oldest_due() < 0.5, "what backs off counts as overdue"
        fails = False
        await until(lambda: backend.count(A) == 3)
        await settled(backend)
        assert backend.count(A) == 3
    record = next(r for r in caplog.records if r.message == "reconcile failed")
    assert (record.resource, record.retry_in) == ("default/a", 0.5)
    assert "the disk is full" in record.error


async def test_the_back_off_doubles_up_to_its_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY", 0.02)
    monkeypatch.setattr(module, "LAST_RETRY", 0.1)

    def broken(observation: Observation, now: float) -> Plan:
        raise ValueError("no plan")

    async with running(MemoryBackend(A), broken) as controller:
        await until(lambda: controller.failures >= 6)
    retries = [r.retry_in for r in caplog.records if r.message == "reconcile failed"]
    assert retries[:5] == [0.02, 0.04, 0.08, 0.1, 0.1]


async def test_a_decision_gets_what_the_last_one_left() -> None:
    backend = MemoryBackend(A)
    seen: list[Observation] = []

    def counting(observation: Observation, now: float) -> Plan:
        seen.append(observation)
        n = len(seen)
        status = Status(replicas=n)
        return Plan(
            status,
            Ledger(thresholds={"x": float(n)}),
            Memory(since=observation.memory.since, recommendations=((now, n),)),
            revisit_after=1000.0,
        )

    async with running(backend, counting) as controller:
        await until(lambda: backend.count(A) == 1)
        controller.wake(A)
        await until(lambda: backend.count(A) == 2)
        assert controller.plans()[A].status.replicas == 2
    first, second = seen
    assert first.resource.status is None
    assert first.memory == Memory(since=first.memory.since)
    assert second.resource.status == Status(replicas=1), "the backend's older status came back"
    assert second.ledger.thresholds == {"x": 1.0}
    assert second.memory.recommendations[0][1] == 1
    assert second.memory.since == first.memory.since


async def test_a_status_that_was_not_written_is_not_taken_for_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY", 0.02)
    backend = MemoryBackend(A)
    seen: list[Status | None] = []

    def counting(observation: Observation, now: float) -> Plan:
        seen.append(observation.resource.status)
        return Plan(Status(replicas=len(seen)), observation.ledger, observation.memory, revisit_after=1000.0)

    async def fail_once(key: Key) -> None:
        if len(seen) == 1:
            raise RuntimeError

    backend.on_apply = fail_once
    async with running(backend, counting):
        await until(lambda: len(seen) == 2)
    assert seen == [None, None]


async def test_a_resource_that_is_gone_is_let_go_and_one_that_comes_back_is_new() -> None:
    backend = MemoryBackend(A)
    seen: list[Observation] = []

    def remembering(observation: Observation, now: float) -> Plan:
        seen.append(observation)
        return Plan(Status(), observation.ledger, Memory(since=observation.memory.since, recommendations=((now, 7),)), revisit_after=1000.0)

    async with running(backend, remembering) as controller:
        await until(lambda: backend.count(A) == 1)
        known = backend.resources.pop(A)
        controller.wake(A)
        await until(lambda: A not in controller.plans())
        backend.resources[A] = dataclasses.replace(known, resource=resource("a", uid="2"))
        controller.wake(A)
        await until(lambda: backend.count(A) == 2)
        # Deleted and created again between two reconciles.
        backend.resources[A] = dataclasses.replace(known, resource=resource("a", uid="3"))
        controller.wake(A)
        await until(lambda: backend.count(A) == 3)
    assert [observation.memory.recommendations for observation in seen] == [(), (), ()]


async def test_it_looks_again_when_the_plan_says_so() -> None:
    backend = MemoryBackend(A)

    def often(observation: Observation, now: float) -> Plan:
        return Plan(Status(), observation.ledger, observation.memory, revisit_after=0.05)

    async with running(backend, often):
        await until(lambda: backend.count(A) >= 4)


# -- agents ----------------------------------------------------------------------------------------------------------------------


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
