"""Talks to the agents of a fleet: samples their load apart from the reconcile, and carries Configure and Drain to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from decodefleet.endpoints import host_port
from decodefleet.units import parse_duration
from decodefleet.v1 import control_pb2 as pb
from decodefleet.v1.control_pb2_grpc import AgentControlStub
from decodefleet_operator.api import Metric
from decodefleet_operator.backend import Backend
from decodefleet_operator.demand import History, demand, record
from decodefleet_operator.observation import CurvePoint, Demand, Key, Load, ObjectiveCount, PodView
from decodefleet_operator.planning import RuntimeConfig

log = logging.getLogger(__name__)

Observer = Callable[[Key, PodView, Load | None], None]

_METRICS = {
    Metric.TimeToFirstToken: pb.Objective.TIME_TO_FIRST_TOKEN,
    Metric.TimePerOutputToken: pb.Objective.TIME_PER_OUTPUT_TOKEN,
    Metric.Availability: pb.Objective.AVAILABILITY,
    Metric.RequestDuration: pb.Objective.REQUEST_DURATION,
    Metric.QueueTime: pb.Objective.QUEUE_TIME,
}
_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
)


class AgentClient:
    """AgentControl of any agent, over one cached channel per address."""

    def __init__(self, timeout: float = 2.0) -> None:
        self._timeout = timeout
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def load(self, pod: PodView, token: str) -> Load:
        """The agent's answer to GetLoad. Raises grpc.aio.AioRpcError."""
        response = await self._stub(pod).GetLoad(pb.GetLoadRequest(), timeout=self._timeout, metadata=_bearer(token))
        return load_of(response, time.time())

    async def configure(self, pod: PodView, token: str, config: RuntimeConfig) -> None:
        """Gives a running agent its objectives, limits and drain settings. Raises grpc.aio.AioRpcError."""
        await self._stub(pod).Configure(configure_request(config), timeout=self._timeout, metadata=_bearer(token))

    async def drain(self, pod: PodView, token: str, timeout: float) -> None:
        """Asks an agent to stop admission and let open streams end within `timeout` seconds. Raises grpc.aio.AioRpcError."""
        await self._stub(pod).Drain(pb.DrainRequest(timeout_seconds=timeout), timeout=self._timeout, metadata=_bearer(token))

    async def keep(self, addresses: Iterable[str]) -> None:
        """Closes the channels to all other addresses."""
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address).close()

    async def close(self) -> None:
        await self.keep(())

    def _stub(self, pod: PodView) -> AgentControlStub:
        address = control_address(pod)
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return AgentControlStub(self._channels[address])


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def control_address(pod: PodView) -> str:
    """host:port of the pod's AgentControl."""
    return host_port(pod.address or "", pod.control_port)


def reachable(pod: PodView) -> bool:
    """Whether there is an agent to ask: it runs, has an address, and its machine is not lost."""
    return pod.phase == "Running" and bool(pod.address) and pod.control_port > 0 and not pod.lost


def configure_request(config: RuntimeConfig) -> pb.ConfigureRequest:
    return pb.ConfigureRequest(
        generation=config.generation,
        objectives=[
            pb.Objective(
                name=o.name,
                metric=_METRICS[o.metric],
                threshold_seconds=parse_duration(o.threshold) if o.threshold else 0.0,
                target=float(o.target.removesuffix("%")) / 100,
            )
            for o in config.objectives
        ],
        max_waiting=config.max_waiting,
        drain_timeout_seconds=config.drain_timeout,
    )


def load_of(response: pb.GetLoadResponse, at: float) -> Load:
    """The answer as a value. What warm-up has not measured yet is None."""
    measured = response.HasField("warm_up")
    warm_up = response.warm_up
    return Load(
        at=at,
        instance_id=response.instance_id,
        state=pb.AgentState.Name(response.state).removeprefix("AGENT_STATE_"),
        generation=response.generation,
        running=response.running,
        waiting=response.waiting,
        queued_prompt_tokens=response.queued_prompt_tokens,
        queued_output_tokens=response.queued_output_tokens,
        kv_bytes_used=response.kv_bytes_used,
        kv_bytes_total=response.kv_bytes_total,
        kv_bytes_cached=response.kv_bytes_cached,
        arrived_requests=response.arrived_requests,
        arrived_prompt_tokens=response.arrived_prompt_tokens,
        arrived_max_tokens=response.arrived_max_tokens,
        prompt_tokens=response.prompt_tokens,
        generated_tokens=response.generated_tokens,
        finished_requests=response.finished_requests,
        finished_output_tokens=response.finished_output_tokens,
        failed_requests=response.failed_requests,
        rejected_requests=sum(response.rejected_requests.values()),
        busy_seconds=response.busy_seconds,
        objectives={o.name: _count_of(o) for o in response.objectives},
        load_seconds=(warm_up.load_seconds or None) if measured else None,
        warm_up_seconds=(warm_up.warm_up_seconds or None) if measured else None,
        prefill_tokens_per_second=(warm_up.prefill_tokens_per_second or None) if measured else None,
        curve=tuple(CurvePoint(p.batch, p.step_seconds, p.tokens_per_second) for p in warm_up.curve) if measured else (),
    )


def _count_of(count: pb.ObjectiveCount) -> ObjectiveCount:
    observed = count.observed_seconds if count.HasField("observed_seconds") else None
    return ObjectiveCount(count.good, count.total, count.threshold_seconds, count.epoch, observed)


def material(old: Load | None, new: Load) -> bool:
    """Whether a decision may depend on the difference, so that waiting for the next reconcile would be late."""
    if old is None or (old.state, old.instance_id, old.generation) != (new.state, new.instance_id, new.generation):
        return True
    idle_before, idle_now = old.running + old.waiting == 0, new.running + new.waiting == 0
    return (new.state == "DRAINING" and idle_now and not idle_before) or (old.waiting == 0) != (new.waiting == 0)


@dataclass(slots=True)
class _Fleet:
    """What was sampled of one resource: newest answers by pod name, each with the uid that it came from."""

    loads: dict[str, tuple[str, Load]] = field(default_factory=dict)
    history: History = field(default_factory=History)


class Sampler:
    """Asks every agent for its load about once per interval, and never lets a slow one hold the others.

    A pass over thousands of pods takes longer than the interval; the next one then waits three times as long as the pass took, so that
    sampling never takes more than a quarter of a core.
    """

    def __init__(self, backend: Backend, client: AgentClient, interval: float = 1.0, parallel: int = 128) -> None:
        self._backend = backend
        self._client = client
        self._interval = interval
        self._slots = asyncio.Semaphore(parallel)
        self._fleets: dict[Key, _Fleet] = {}
        self._wake: Callable[[Key], None] = lambda key: None
        self.observers: list[Observer] = []  # called after each try, with None where there was no answer

    async def run(self, wake: Callable[[Key], None]) -> None:
        """Samples until cancelled; `wake` is called when a load changed materially."""
        self._wake = wake
        while True:
            began = time.monotonic()
            try:
                await self.sample()
            except Exception:
                log.exception("sampling failed")
            took = time.monotonic() - began
            await asyncio.sleep(max(self._interval - took, 3 * took if took > self._interval / 4 else 0.0, 0.05))

    async def sample(self) -> None:
        """One pass over all fleets."""
        known = {key: k for key in tuple(self._backend.keys()) if (k := self._backend.known(key)) is not None}
        for key in self._fleets.keys() - known.keys():
            del self._fleets[key]
        targets = [(key, pod, k.control_token) for key, k in known.items() if k.control_token for pod in k.pods if reachable(pod)]
        await self._client.keep(control_address(pod) for _, pod, _ in targets)
        await asyncio.gather(*(self._ask(key, pod, token) for key, pod, token in targets))
        now = time.time()
        for key, k in known.items():
            fleet = self._fleets.setdefault(key, _Fleet())
            uids = {pod.name: pod.uid for pod in k.pods}
            fleet.loads = {name: (uid, load) for name, (uid, load) in fleet.loads.items() if uids.get(name) == uid}
            fleet.history = record(fleet.history, self.loads(key), now)

    def loads(self, key: Key) -> dict[str, Load]:
        """The newest answer of each pod, however old; a pod that never answered is absent."""
        fleet = self._fleets.get(key)
        return {name: load for name, (_, load) in fleet.loads.items()} if fleet else {}

    def demand(self, key: Key, window: float, now: float) -> Demand | None:
        """What arrived over the last `window` seconds; None where that is not known."""
        fleet = self._fleets.get(key)
        return demand(fleet.history, window, now) if fleet else None

    async def _ask(self, key: Key, pod: PodView, token: str) -> None:
        load: Load | None = None
        async with self._slots:
            with suppress(grpc.aio.AioRpcError):
                load = await self._client.load(pod, token)
        if load is not None:
            fleet = self._fleets.setdefault(key, _Fleet())
            uid, old = fleet.loads.get(pod.name, (pod.uid, None))
            fleet.loads[pod.name] = (pod.uid, load)
            if material(old if uid == pod.uid else None, load):
                self._wake(key)
        for observer in self.observers:
            observer(key, pod, load)


async def carry(
    client: AgentClient,
    pods: Mapping[str, PodView],
    token: str | None,
    configure: Iterable[str],
    config: RuntimeConfig | None,
    drain: Iterable[str],
    drain_timeout: float,
) -> list[str]:
    """Carries Configure and Drain to pods by name, in parallel. Returns what failed, for a log line; a dead agent is not an error here."""
    if token is None:
        return []
    calls = {}
    for name in drain:
        if name in pods and reachable(pods[name]):
            calls[f"drain {name}"] = client.drain(pods[name], token, drain_timeout)
    for name in configure:
        if config is not None and name in pods and reachable(pods[name]):
            calls[f"configure {name}"] = client.configure(pods[name], token, config)
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    failures = []
    for call, result in zip(calls, results, strict=True):
        if isinstance(result, grpc.aio.AioRpcError):
            failures.append(f"{call}: {result.code().name} {result.details()}")
        elif isinstance(result, BaseException):
            raise result
    return failures
