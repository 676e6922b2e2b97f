"""The control loop: a keyed queue whose wake-ups coalesce, and one task per resource that observes, plans and applies."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from decodefleet.units import parse_duration
from decodefleet_operator.agents import AgentClient, Sampler, carry
from decodefleet_operator.api import Autoscaling
from decodefleet_operator.backend import Backend, Known
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.observation import Key, Memory, Observation
from decodefleet_operator.plan import plan as decide
from decodefleet_operator.planning import Plan

log = logging.getLogger(__name__)

SETTLE = 0.05  # seconds that a wake-up waits for others
FIRST_RETRY, LAST_RETRY = 1.0, 30.0
CALL_RETRY = 2.0  # seconds until Configure or Drain is tried again

_SHORT_WINDOW = parse_duration(Autoscaling.model_fields["short_window"].default)
_LONG_WINDOW = parse_duration(Autoscaling.model_fields["long_window"].default)


@dataclass(slots=True)
class _Turn:
    """When a resource is due, by the event loop's clock."""

    due: float
    not_before: float = 0.0
    owed_since: float | None = None  # since when the running reconcile was due
    failures: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        while (delay := max(self.due, self.not_before) - loop.time()) > 0:
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(delay if delay < math.inf else None):
                    await self.changed.wait()


@dataclass(slots=True)
class _Remembered:
    """What the last decision on a resource leaves for the next."""

    uid: str
    memory: Memory
    ledger: Ledger | None = None
    plan: Plan | None = None
    applied: bool = False


class Controller:
    """Runs one backend. `wake` and `run` belong to the same event loop."""

    def __init__(
        self,
        backend: Backend,
        client: AgentClient,
        sampler: Sampler,
        decide: Callable[[Observation, float], Plan] = decide,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._client = client
        self._sampler = sampler
        self._decide = decide
        self._clock = clock
        self._turns: dict[Key, _Turn] = {}
        self._remembered: dict[Key, _Remembered] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self.reconciles = 0
        self.failures = 0

    async def run(self) -> None:
        """Runs the backend, the sampler and the reconciles until cancelled. No reconcile begins before the backend has synced."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._backend.run(self.wake), name="backend")
            await self._backend.synced()
            tasks.create_task(self._sampler.run(self.wake), name="sampler")
            self._tasks = tasks
            for key in {*self._turns, *self._backend.keys()}:
                self._start(key)

    def wake(self, key: Key) -> None:
        """Asks for a reconcile soon. Any number of calls before it begins are one; a call while it runs is one more after it."""
        turn = self._turns.get(key)
        now = asyncio.get_running_loop().time()
        if turn is not None:
            turn.due = min(turn.due, now + SETTLE)
            turn.changed.set()
            return
        self._turns[key] = _Turn(due=now + SETTLE)
        if self._tasks is not None:
            self._start(key)

    def plan_of(self, key: Key) -> Plan | None:
        """The last plan, for metrics and health."""
        remembered = self._remembered.get(key)
        return remembered.plan if remembered else None

    def plans(self) -> dict[Key, Plan]:
        return {key: r.plan for key, r in self._remembered.items() if r.plan is not None}

    def oldest_due(self) -> float:
        """Age in seconds of the oldest reconcile that is due and not done; 0 where none is. One that backs off after an error is not."""
        now = asyncio.get_running_loop().time()
        dues = (max(t.due, t.not_before) if t.owed_since is None else t.owed_since for t in self._turns.values())
        return max((now - due for due in dues if due < now), default=0.0)

    def _start(self, key: Key) -> None:
        assert self._tasks is not None
        turn = self._turns.setdefault(key, _Turn(due=asyncio.get_running_loop().time()))
        self._tasks.create_task(self._own(key, turn), name=f"reconcile {key}")

    async def _own(self, key: Key, turn: _Turn) -> None:
        """The loop of one resource; ends when the resource is gone."""
        loop = asyncio.get_running_loop()
        while True:
            await turn.wait()
            turn.owed_since, turn.due = max(turn.due, turn.not_before), math.inf
            try:
                revisit = await self._reconcile(key)
            except Exception as error:
                revisit = min(FIRST_RETRY * 2**turn.failures, LAST_RETRY)
                turn.failures = min(turn.failures + 1, 10)
                turn.not_before = loop.time() + revisit
                self.failures += 1
                fields = {"resource": str(key), "failures": turn.failures, "retry_in": revisit, "error": repr(error)}
                log.exception("reconcile failed", extra=fields)
            else:
                turn.failures = 0
                if revisit is None:
                    self._turns.pop(key, None)
                    self._remembered.pop(key, None)
                    return
            turn.due = min(turn.due, loop.time() + revisit)
            turn.owed_since = None

    async def _reconcile(self, key: Key) -> float | None:
        """Observe, plan, apply. Returns the seconds until the next one; None when the resource is gone."""
        if self._backend.known(key) is None:
            return None
        await self._backend.prepare(key)
        known = self._backend.known(key)
        if known is None:
            return None
        now = self._clock()
        remembered = self._remembered.get(key)
        if remembered is None or remembered.uid != known.resource.metadata.uid:
            remembered = self._remembered[key] = _Remembered(known.resource.metadata.uid, Memory(since=now))
        observation = observe(known, key, self._sampler, remembered.memory, remembered.ledger, now)
        if remembered.applied and remembered.plan is not None:
            # What was written last may not have come back yet; decided again, it would be announced again.
            resource = observation.resource.model_copy(update={"status": remembered.plan.status})
            observation = replace(observation, resource=resource)
        plan = self._decide(observation, now)
        remembered.plan, remembered.memory, remembered.ledger, remembered.applied = plan, plan.memory, plan.ledger, False
        await self._backend.apply(key, plan)
        remembered.applied = True
        self.reconciles += 1
        return await self._tell_agents(key, known, plan)

    async def _tell_agents(self, key: Key, known: Known, plan: Plan) -> float:
        """Configure and Drain, after the writes. Returns the seconds until the next look; plan() asks again for what an agent missed."""
        failures = await carry(
            self._client,
            {pod.name: pod for pod in known.pods},
            known.control_token,
            [ref.name for ref in plan.configure],
            plan.config,
            [ref.name for ref in plan.drain],
            known.resource.spec.drain_timeout,
        )
        if not failures:
            return plan.revisit_after
        log.warning("agents did not answer", extra={"resource": str(key), "calls": failures})
        return min(plan.revisit_after, CALL_RETRY)


def observe(known: Known, key: Key, sampler: Sampler, memory: Memory, ledger: Ledger | None, now: float) -> Observation:
    """All that plan() may know, from memory. The ledger of the last decision is newer than what was written of it."""
    autoscaling = known.resource.spec.autoscaling
    short = parse_duration(autoscaling.short_window) if autoscaling else _SHORT_WINDOW
    long = parse_duration(autoscaling.long_window) if autoscaling else _LONG_WINDOW
    return Observation(
        resource=known.resource,
        revision=known.revision,
        pods=known.pods,
        loads=sampler.loads(key),
        short=sampler.demand(key, short, now),
        long=sampler.demand(key, long, now),
        ledger=ledger or known.ledger or Ledger(),
        memory=memory,
        replicas_writer=known.replicas_writer,
        endpoint=known.endpoint,
        error=known.error,
        warnings=known.warnings,
        gpu_profiles=known.gpu_profiles,
    )
