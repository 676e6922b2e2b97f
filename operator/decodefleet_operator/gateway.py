"""One address for a fleet: a gRPC proxy that forwards each call to the least loaded agent, bytes for bytes."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from decodefleet import metadata
from decodefleet.endpoints import host_port
from decodefleet.v1 import decoding_pb2

log = logging.getLogger(__name__)

SERVICE = decoding_pb2.DESCRIPTOR.services_by_name["Decoding"].full_name
ATTEMPTS = 3  # agents that one request tries at most
MAX_MESSAGE = 64 << 20

_OWN_METADATA = ("grpc-", ":", "user-agent", "content-type", "te")
_DETAILS = "grpc-status-details-bin"
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
)
_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
)

Metadata = tuple[tuple[str, str | bytes], ...]


class CannotListen(Exception):
    """The gateway's address cannot be bound; the message says why and what to change."""


class PortTaken(CannotListen):
    """Somebody listens there."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A place to send requests to."""

    name: str
    address: str


class Gateway:
    """Serves Decoding in front of agents, with health and reflection.

    `agents` names those that may get new requests now. What an agent refuses with UNAVAILABLE before its first message goes to another one,
    but a request in which engines die is not passed on from one to the next.
    """

    def __init__(self, agents: Callable[[], Iterable[Agent]]) -> None:
        self._agents = agents
        self._channels: dict[str, grpc.aio.Channel] = {}
        # By address, so that an agent which came back under its name starts afresh.
        self._in_flight: dict[str, int] = {}
        self._elsewhere: dict[str, int] = {}  # requests that did not come through here
        self._last_picked: dict[str, int] = {}
        self._picks = 0
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.requests = 0
        self.retries = 0

    async def start(self, host: str, port: int) -> int:
        """Binds and serves; returns the port. Raises CannotListen, which is PortTaken where the address is all right."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((_Handlers(self),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            bound = server.add_insecure_port(host_port(host, port))
        except RuntimeError as error:
            raise _why_not(host, port) from error
        await self.refresh()
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace: float) -> None:
        """Takes no new requests; those that are open may go on for `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace)
        for channel in self._channels.values():
            await channel.close()

    async def refresh(self) -> None:
        """Brings health and channels in line with the agents that serve now. Call it when they may have changed."""
        addresses = {agent.address for agent in self._agents()}
        status = health_pb2.HealthCheckResponse.SERVING if addresses else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)
        for counts in (self._elsewhere, self._last_picked):
            for address in counts.keys() - addresses:
                del counts[address]
        # A draining agent serves nothing new, but its open streams need their channel.
        for address in self._channels.keys() - addresses - self._in_flight.keys():
            await self._channels.pop(address).close()

    def observe(self, address: str, requests: int) -> None:
        """Tells how many requests an agent holds by its own count; those that others sent it add to its load here."""
        self._elsewhere[address] = max(0, requests - self._in_flight.get(address, 0))

    def in_flight(self) -> int:
        """Requests that are open now."""
        return sum(self._in_flight.values())

    def pick(self, tried: set[str]) -> Agent | None:
        """The agent with the fewest requests, and of equal ones the one that was picked longest ago. None: all were tried."""
        agent = min((a for a in self._agents() if a.address not in tried), key=self._load, default=None)
        if agent is not None:
            self._picks += 1
            self._last_picked[agent.address] = self._picks
        return agent

    def _load(self, agent: Agent) -> tuple[int, int]:
        requests = self._in_flight.get(agent.address, 0) + self._elsewhere.get(agent.address, 0)
        return requests, self._last_picked.get(agent.address, 0)

    async def forward(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> None:
        """Carries one call. What the agent sends is passed on as it comes; its status ends the call."""
        self.requests += 1
        tried: set[str] = set()
        deaths = 0
        code, details, trailing = grpc.StatusCode.UNAVAILABLE, "no agent of this fleet serves yet; see `decodefleet get`", Metadata()
        while len(tried) < ATTEMPTS and (agent := self.pick(tried)) is not None:
            self.retries += bool(tried)
            tried.add(agent.address)
            answered, code, details, trailing = await self._attempt(agent, method, request, context)
            if code == grpc.StatusCode.CANCELLED:
                # Not by our caller, who would have ended this task: the agent closed its connections while the call was on its way.
                code, details = grpc.StatusCode.UNAVAILABLE, "the agent went away"
            if answered or code != grpc.StatusCode.UNAVAILABLE:
                break
            deaths += metadata.ENGINE_DIED in dict(trailing)
            if deaths >= metadata.MAX_DEATHS:
                code, details = grpc.StatusCode.INTERNAL, f"{deaths} engines died with this request, which may be why; {details}"
                break
            log.info("agent refused a request", extra={"agent": agent.name, "attempt": len(tried), "details": details})
        context.set_trailing_metadata((*trailing, (metadata.ATTEMPTS, str(len(tried)))))
        if code != grpc.StatusCode.OK:
            await context.abort(code, details)

    async def _attempt(
        self, agent: Agent, method: str, request: bytes, context: grpc.aio.ServicerContext
    ) -> tuple[bool, grpc.StatusCode, str, Metadata]:
        """One call of one agent: whether any message came, and its status, details and trailing metadata."""
        answered = False
        self._in_flight[agent.address] = self._in_flight.get(agent.address, 0) + 1
        call = self._channel(agent.address).unary_stream(method)(
            request, timeout=context.time_remaining(), metadata=_passed(context.invocation_metadata())
        )
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if not answered:
                    answered = True
                    initial = _passed(await call.initial_metadata())
                    await context.send_initial_metadata((*initial, (metadata.AGENT, agent.name)))
                await context.write(message)
            return answered, await call.code(), await call.details() or "", _passed(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            return answered, error.code(), _details(agent, error), _passed(error.trailing_metadata())
        finally:
            call.cancel()
            self._in_flight[agent.address] -= 1
            if not self._in_flight[agent.address]:
                del self._in_flight[agent.address]

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return self._channels[address]


def _why_not(host: str, port: int) -> CannotListen:
    """What the system says to somebody who wants to listen there; gRPC does not tell."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
    except socket.gaierror:
        return CannotListen(f"{host} is neither an address nor the name of one; choose another with --host")
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                return PortTaken(f"port {port} on {host} is taken; choose another with --port, or a free one with --port 0")
            case errno.EACCES | errno.EPERM:
                return CannotListen(f"port {port} is for privileged users; choose one above 1023 with --port")
            case errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT:
                return CannotListen(f"{host} is not an address of this machine; choose another with --host")
            case _:
                return CannotListen(f"{host_port(host, port)} cannot be listened on: {error.strerror}")
    return CannotListen(f"{host_port(host, port)} cannot be listened on; choose another address with --host or --port")


def _details(agent: Agent, error: grpc.aio.AioRpcError) -> str:
    """What an agent said, or that it was not reached: gRPC's words for that name addresses that mean nothing to clients."""
    said = error.details() or ""
    if error.code() == grpc.StatusCode.UNAVAILABLE and said.startswith("failed to connect"):
        return f"agent {agent.name} cannot be reached; try again in a moment, or see `decodefleet get`"
    return said


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Takes every method of Decoding without knowing its messages: a single response is a stream of one."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        if not method.startswith(f"/{SERVICE}/"):
            return None

        async def handle(request: bytes, context: grpc.aio.ServicerContext) -> None:
            await self._gateway.forward(method, request, context)

        return grpc.unary_stream_rpc_method_handler(handle)


def _passed(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """What a proxy hands on: all but what each hop says for itself. The details of an error belong to the caller."""
    return tuple((k, v) for k, v in metadata or () if k == _DETAILS or not k.startswith(_OWN_METADATA))
