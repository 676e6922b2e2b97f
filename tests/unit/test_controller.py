"""The control loop against a small real backend in memory: coalescing, one at a time, errors, and what a decision gets to know."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from loop_world import A, B, MemoryBackend, resource, running, until

from decodefleet_operator import controller as module
from decodefleet_operator.api import Status
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.observation import Key, Memory, Observation
from decodefleet_operator.planning import Plan


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
