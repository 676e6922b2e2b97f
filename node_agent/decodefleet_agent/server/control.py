"""decodefleet.v1.AgentControl: load, configuration and drain, for who holds the fleet's token."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from decodefleet.v1 import control_pb2 as pb
from decodefleet.v1 import control_pb2_grpc
from decodefleet_agent.messages import Targets
from decodefleet_agent.server.agent import Agent
from decodefleet_agent.server.load import read_load
from decodefleet_agent.server.objectives import targets

log = logging.getLogger(__name__)

MAX_OBJECTIVES = 16


class AgentControl(control_pb2_grpc.AgentControlServicer):
    """`token_file` None: client certificates are the authority. `drain` begins a drain of so many seconds and returns at once.

    `keep` tells the engine which latencies are objectives.
    """

    def __init__(
        self, agent: Agent, token_file: str | None, drain: Callable[[float], Awaitable[None]], keep: Callable[[Targets], None]
    ) -> None:
        self._agent, self._drain, self._keep = agent, drain, keep
        self._token_file = Path(token_file) if token_file is not None else None

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        await self._authorise(context)
        return read_load(self._agent)

    async def Configure(self, request: pb.ConfigureRequest, context: grpc.aio.ServicerContext) -> pb.ConfigureResponse:
        await self._authorise(context)
        if problem := _problem(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        if self._agent.configure(request):
            self._keep(targets(request.objectives))
        return pb.ConfigureResponse(generation=self._agent.objectives.generation)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        await self._authorise(context)
        if not 0 <= request.timeout_seconds < float("inf"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"timeout_seconds: is {request.timeout_seconds:g}; it must be at least 0")
        await self._drain(request.timeout_seconds or self._agent.drain_timeout)
        return pb.DrainResponse(running=self._agent.running, waiting=self._agent.waiting)

    async def _authorise(self, context: grpc.aio.ServicerContext) -> None:
        if self._token_file is None:
            return
        try:
            token = self._token_file.read_text().strip()  # read each time: a rotated secret holds at once
        except OSError as error:
            log.error("token_file=%s error=%s", self._token_file, error.strerror)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the agent cannot read its token file: {error.strerror}")
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not token or not hmac.compare_digest(str(given).encode(), f"Bearer {token}".encode()):
            what = "is wrong" if given else "is missing"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the metadata `authorization: Bearer <fleet token>` {what}")


def _problem(request: pb.ConfigureRequest) -> str | None:
    if request.generation < 0:
        return f"generation: is {request.generation}; it must be at least 0"
    if len(request.objectives) > MAX_OBJECTIVES:
        return f"objectives: has {len(request.objectives)}; at most {MAX_OBJECTIVES} are allowed"
    if not 0 <= request.drain_timeout_seconds < float("inf"):
        return f"drain_timeout_seconds: is {request.drain_timeout_seconds:g}; it must be at least 0"
    names = [objective.name for objective in request.objectives]
    for at, objective in enumerate(request.objectives):
        where = f"objectives[{at}]"
        if not objective.name or names.count(objective.name) > 1:
            return f"{where}.name: is {objective.name!r}; each objective needs a name of its own"
        if objective.metric == pb.Objective.METRIC_UNSPECIFIED or objective.metric not in pb.Objective.Metric.values():
            return f"{where}.metric: is {objective.metric}; set one of {', '.join(pb.Objective.Metric.keys()[1:])}"
        if not 0 < objective.target < 1:
            return f"{where}.target: is {objective.target:g}; it must be in (0, 1)"
        if objective.metric != pb.Objective.AVAILABILITY and not 0 < objective.threshold_seconds < float("inf"):
            return f"{where}.threshold_seconds: is {objective.threshold_seconds:g}; it must be above 0"
    return None
