"""A small real backend in memory, and a controller that runs on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from decodefleet_operator.agents import AgentClient, Sampler
from decodefleet_operator.api import DecoderDeployment, Status
from decodefleet_operator.backend import Known
from decodefleet_operator.controller import Controller
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.observation import Key, Observation, PodView
from decodefleet_operator.planning import Plan

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
