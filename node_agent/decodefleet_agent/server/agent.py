"""The agent's state: phase, served model, requests in flight, and the numbers about them. No gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from enum import StrEnum

import grpc

from decodefleet.config import AgentConfig
from decodefleet.units import parse_duration
from decodefleet.v1 import control_pb2
from decodefleet_agent.messages import Progress, Ready, Stats
from decodefleet_agent.server.errors import Refused, invalid, unavailable
from decodefleet_agent.server.metrics import Metrics
from decodefleet_agent.server.objectives import Measured, Objectives, Outcome
from decodefleet_agent.server.request_log import RequestLog
from decodefleet_agent.server.requests import ServedModel, Work

log = logging.getLogger(__name__)

_BUSY_WINDOW = 5.0  # seconds


class Phase(StrEnum):
    """Values are the names in control.proto's AgentState, without the prefix."""

    LOADING = "LOADING"
    WARMING_UP = "WARMING_UP"
    SERVING = "SERVING"
    DRAINING = "DRAINING"


class Agent:
    """One per process. Engine and gRPC servers report here; GetLoad, probes and admission read here."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self.start_time = time.time()
        self.phase = Phase.LOADING
        self.progress = "starting the engine"
        self.model: ServedModel | None = None
        self.ready: Ready | None = None
        self.stats = Stats()
        self.told_to_go = asyncio.Event()  # clients have been sent GOAWAY, so that a refused one tries elsewhere
        self.calls = 0  # of Generate, whatever became of them
        self.in_flight = 0  # sequences of requests that were admitted and have not ended
        self.max_waiting = config.engine.batching.max_waiting
        self.drain_timeout = parse_duration(config.drain_timeout)
        self.metrics = Metrics(running=lambda: self.running, waiting=lambda: self.waiting)
        self.objectives = Objectives(self.metrics)
        self.log = RequestLog(config.request_log)
        self._busy = (time.monotonic(), 0.0)
        self.metrics.start_time.set(self.start_time)
        self.metrics.observe_state(self.phase)

    @property
    def waiting(self) -> int:
        return min(self.in_flight, self.stats.waiting)

    @property
    def running(self) -> int:
        return self.in_flight - self.waiting

    def enter(self, phase: Phase) -> None:
        """A draining agent stays so."""
        if self.phase not in (phase, Phase.DRAINING):
            self.phase = phase
            self.metrics.observe_state(phase)
            log.info("state=%s", phase)

    def observe_progress(self, progress: Progress) -> None:
        self.progress = f"{progress.text} ({progress.done:.0%})"
        self.enter(Phase.WARMING_UP if progress.phase == "warming_up" else Phase.LOADING)

    def observe_ready(self, ready: Ready) -> None:
        self.ready = ready
        self.metrics.observe_ready(ready)

    def observe_stats(self, stats: Stats) -> None:
        self.stats = stats
        self.metrics.observe_step(stats)
        now = time.monotonic()
        since, busy = self._busy
        if now - since >= _BUSY_WINDOW:
            self.metrics.busy_ratio.set(min(1.0, (stats.busy_seconds - busy) / (now - since)))
            self._busy = (now, stats.busy_seconds)

    def configure(self, request: control_pb2.ConfigureRequest) -> bool:
        """Ignored, and False, if its generation is older than the current one."""
        if not self.objectives.configure(request.generation, request.objectives):
            return False
        self.max_waiting = request.max_waiting or self.config.engine.batching.max_waiting
        self.drain_timeout = request.drain_timeout_seconds or parse_duration(self.config.drain_timeout)
        return True

    def serving_model(self) -> ServedModel:
        """Raises Refused with UNAVAILABLE while the agent does not serve."""
        if self.phase is Phase.DRAINING:
            raise unavailable("the agent drains; another replica may serve the request", "draining")
        if self.phase is not Phase.SERVING or self.model is None:
            raise unavailable(f"the agent is not ready: {self.progress}", "loading")
        return self.model

    def admit(self, work: Work) -> None:
        """Counts the request as arrived, and as in flight. Raises Refused with RESOURCE_EXHAUSTED if the queue is full."""
        most = self.config.engine.batching.max_batch + self.max_waiting
        if len(work.samples) > most:
            raise invalid(f"sampling.n: is {len(work.samples)}; this agent runs and queues at most {most} samples together")
        self.metrics.arrived.inc()
        self.metrics.arrived_prompt_tokens.inc(len(work.prompt_ids))
        self.metrics.arrived_max_tokens.inc(work.max_tokens)
        # The engine left sequences waiting: it takes no more than it runs. Otherwise it takes up to its largest batch.
        places = self.stats.running if self.stats.waiting else self.config.engine.batching.max_batch
        if self.in_flight + len(work.samples) > places + self.max_waiting:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the queue is full: {self.in_flight - places} wait and at most {self.max_waiting} may",
                reason="queue_full",
                retry_after=self._retry_after(),
            )
        self.in_flight += len(work.samples)

    def _retry_after(self) -> float:
        """About the time until a place is free: running sequences end one after another."""
        rate = sum(point.tokens_per_second for point in self.ready.curve[-1:]) if self.ready else 0.0
        tokens = self.stats.queued_output_tokens / max(1, self.in_flight)
        return min(30.0, max(0.5, tokens / rate)) if rate else 1.0

    def leave(self, work: Work, outcome: Outcome, measured: Measured, completion_tokens: int, error: str | None = None) -> None:
        """An admitted request has ended."""
        self.in_flight -= len(work.samples)
        self.metrics.observe_request(outcome, measured, completion_tokens)
        self._record(work.request_id, outcome, measured, len(work.prompt_ids), completion_tokens, error)

    def reject(self, work: Work, measured: Measured, error: str) -> None:
        """A full queue turned the request away."""
        self._record(work.request_id, Outcome.rejected, measured, len(work.prompt_ids), 0, error)

    def _record(self, request_id: str, outcome: Outcome, measured: Measured, prompt: int, completion: int, error: str | None) -> None:
        good = self.objectives.count(outcome, measured)
        self.log.write(request_id, outcome, measured, good, prompt_tokens=prompt, completion_tokens=completion, error=error)
