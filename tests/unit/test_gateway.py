"""The gateway in front of real gRPC servers: whom it picks, what it passes on, when it tries another agent."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from google.protobuf import any_pb2, descriptor_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from decodefleet.metadata import ENGINE_DIED
from decodefleet.v1 import decoding_pb2 as pb
from decodefleet.v1 import decoding_pb2_grpc
from decodefleet_operator.gateway import ATTEMPTS, SERVICE, Agent, CannotListen, Gateway, PortTaken


class Decoder(decoding_pb2_grpc.DecodingServicer):
    """An agent that does what the prompt says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self.refuses = False
        self.calls = 0
        self.cancelled = 0
        self.deadlines: list[float | None] = []
        self.metadata: dict[str, str] = {}
        self.go_on = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        self.calls += 1
        self.deadlines.append(context.time_remaining())
        self.metadata = dict(context.invocation_metadata())
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self.name} drains")
        if request.prompt == "kills":
            context.set_trailing_metadata(((ENGINE_DIED, "1"),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine died: exit code 1")
        if request.prompt == f"not {self.name}":
            await context.abort(grpc.StatusCode.CANCELLED, "")
        if request.prompt == "full":
            retry = any_pb2.Any()
            retry.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=7)))
            status = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="the queue is full", details=[retry])
            await context.abort_with_status(rpc_status.to_status(status))
        await context.send_initial_metadata((("x-from", self.name),))
        context.set_trailing_metadata((("x-after", "done"),))
        try:
            yield pb.GenerateResponse(start=pb.StreamStart(instance_id=self.name))
            if request.prompt == "dies":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine died")
            if request.prompt == "wait":
                await self.go_on.wait()
            yield pb.GenerateResponse(usage=pb.Usage(completion_tokens=3))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        return pb.GetModelResponse(uri=self.name)


class Fleet:
    """Agents, those of them that serve, and the gateway with a client."""

    def __init__(self, gateway: Gateway, decoders: list[Decoder], serving: list[Decoder], channel: grpc.aio.Channel, port: int) -> None:
        self.gateway, self.decoders, self.serving, self.channel, self.port = gateway, decoders, serving, channel, port
        self.stub = decoding_pb2_grpc.DecodingStub(channel)

    def generate(self, prompt: str = "", **options: object) -> grpc.aio.UnaryStreamCall:
        return self.stub.Generate(pb.GenerateRequest(prompt=prompt), **{"timeout": 60, **options})

    async def answer(self, prompt: str = "", **options: object) -> str:
        """The name of the agent that answered."""
        responses = [response async for response in self.generate(prompt, **options)]
        assert responses[-1].usage.completion_tokens == 3
        return responses[0].start.instance_id

    async def opened(self, prompt: str = "wait") -> tuple[grpc.aio.UnaryStreamCall, Decoder]:
        """A stream that has begun, and its agent."""
        call = self.generate(prompt)
        first = await call.read()
        return call, next(d for d in self.decoders if d.name == first.start.instance_id)


@contextlib.asynccontextmanager
async def fleet(count: int) -> AsyncIterator[Fleet]:
    servers, decoders = [], [Decoder(f"agent-{n}") for n in range(count)]
    for decoder in decoders:
        server = grpc.aio.server()
        decoding_pb2_grpc.add_DecodingServicer_to_server(decoder, server)
        decoder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    serving = list(decoders)
    gateway = Gateway(lambda: [Agent(d.name, d.address) for d in serving])
    port = await gateway.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Fleet(gateway, decoders, serving, channel, port)
    await gateway.stop(0)
    for server in servers:
        await server.stop(None)


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


async def test_streams_single_responses_metadata_and_trailers_pass_through() -> None:
    async with fleet(1) as f:
        call = f.generate(metadata=(("x-tenant", "blue"),))
        responses = [response async for response in call]
        assert [r.HasField("usage") for r in responses] == [False, True]
        assert dict(await call.initial_metadata())["x-from"] == "agent-0"
        assert dict(await call.initial_metadata())["decodefleet-agent"] == "agent-0"
        trailing = dict(await call.trailing_metadata())
        assert (trailing["x-after"], trailing["decodefleet-attempts"]) == ("done", "1")
        assert f.decoders[0].metadata["x-tenant"] == "blue"
        assert (await f.stub.GetModel(pb.GetModelRequest(), timeout=60)).uri == "agent-0"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.channel.unary_unary("/decodefleet.v1.AgentControl/GetLoad")(b"", timeout=60)
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED, "the control service is not for clients"


async def test_the_agent_with_the_fewest_requests_is_picked() -> None:
    async with fleet(3) as f:
        opened = [await f.opened() for _ in range(6)]
        assert sorted(d.name for _, d in opened) == ["agent-0", "agent-0", "agent-1", "agent-1", "agent-2", "agent-2"]
        for call, decoder in opened:
            if decoder.name == "agent-1":
                call.cancel()
        await until(lambda: f.gateway.in_flight() == 4)
        assert {await f.answer(), await f.answer()} == {"agent-1"}


async def test_requests_that_an_agent_got_from_elsewhere_count() -> None:
    async with fleet(2) as f:
        call, busy = await f.opened()
        idle = next(d for d in f.decoders if d is not busy)
        f.gateway.observe(busy.address, 1)  # the one that came through here
        f.gateway.observe(idle.address, 5)
        assert [await f.answer() for _ in range(3)] == [busy.name] * 3
        f.gateway.observe(idle.address, 0)
        assert await f.answer() == idle.name
        call.cancel()


async def test_what_an_agent_refuses_goes_to_another_one() -> None:
    async with fleet(3) as f:
        f.decoders[0].refuses = f.decoders[1].refuses = True
        for _ in range(4):
            assert await f.answer() == "agent-2"
        assert f.gateway.retries > 0


async def test_an_agent_that_is_gone_is_passed_over() -> None:
    async with fleet(1) as f:
        gone = Decoder("gone")
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            gone.address = f"127.0.0.1:{unused.getsockname()[1]}"
        f.serving.append(gone)
        for _ in range(4):
            assert await f.answer() == "agent-0"


async def test_an_agent_that_cannot_be_reached_is_told_by_its_name() -> None:
    async with fleet(1) as f:
        call, _ = await f.opened()
        f.serving.clear()
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            gone = Decoder("gone")
            gone.address = f"127.0.0.1:{unused.getsockname()[1]}"
            f.serving.append(gone)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await f.answer()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "agent gone cannot be reached; try again in a moment, or see `decodefleet get`"
        call.cancel()


async def test_attempts_are_bounded_and_the_last_refusal_is_told() -> None:
    async with fleet(ATTEMPTS + 2) as f:
        for decoder in f.decoders:
            decoder.refuses = True
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.answer()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error.value.details().endswith("drains")
        assert dict(error.value.trailing_metadata())["decodefleet-attempts"] == str(ATTEMPTS)
        assert sum(d.calls for d in f.decoders) == ATTEMPTS


async def test_nothing_is_tried_again_after_the_first_message() -> None:
    async with fleet(2) as f:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.answer("dies")
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine died")
        assert sum(d.calls for d in f.decoders) == 1


async def test_a_request_in_which_engines_die_does_not_go_on_from_one_to_the_next() -> None:
    async with fleet(4) as f:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.answer("kills")
        assert error.value.code() == grpc.StatusCode.INTERNAL
        assert error.value.details() == "2 engines died with this request, which may be why; the engine died: exit code 1"
        assert sum(d.calls for d in f.decoders) == 2


async def test_an_agent_that_goes_while_a_request_is_on_its_way_is_not_the_callers_cancellation() -> None:
    async with fleet(2) as f:
        one, other = f.decoders
        assert await f.answer(f"not {one.name}") == other.name
        assert (one.calls, other.calls) == (1, 1)
    async with fleet(1) as f:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.answer(f"not {f.decoders[0].name}")
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the agent went away")


async def test_a_full_queue_is_told_with_its_retry_info_and_not_tried_elsewhere() -> None:
    async with fleet(2) as f:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.answer("full")
        status = rpc_status.from_call(error.value)
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        retry = error_details_pb2.RetryInfo()
        assert status is not None and status.details[0].Unpack(retry)
        assert retry.retry_delay.seconds == 7
        assert sum(d.calls for d in f.decoders) == 1


async def test_without_an_agent_the_answer_says_so() -> None:
    async with fleet(1) as f:
        f.serving.clear()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.answer()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "decodefleet get" in error.value.details()


async def test_cancelling_reaches_the_agent() -> None:
    async with fleet(1) as f:
        call, decoder = await f.opened()
        assert f.gateway.in_flight() == 1
        call.cancel()
        await until(lambda: decoder.cancelled == 1)
        await until(lambda: f.gateway.in_flight() == 0)


async def test_a_deadline_reaches_the_agent() -> None:
    async with fleet(1) as f:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await f.answer("wait", timeout=1.0)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < (f.decoders[0].deadlines[0] or 0) <= 1.0
        await until(lambda: f.decoders[0].cancelled == 1)


async def test_a_draining_agent_gets_nothing_new_and_keeps_its_streams() -> None:
    async with fleet(2) as f:
        call, draining = await f.opened()
        f.serving.remove(draining)
        await f.gateway.refresh()
        assert {await f.answer() for _ in range(4)} == {next(d.name for d in f.decoders if d is not draining)}
        draining.go_on.set()
        assert (await call.read()).usage.completion_tokens == 3
        assert await call.code() == grpc.StatusCode.OK


async def test_health_follows_the_agents() -> None:
    async with fleet(1) as f:
        health = health_pb2_grpc.HealthStub(f.channel)

        async def state(service: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)).status

        assert [await state(""), await state(SERVICE)] == [health_pb2.HealthCheckResponse.SERVING] * 2
        f.serving.clear()
        await f.gateway.refresh()
        assert [await state(""), await state(SERVICE)] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2


async def test_reflection_describes_the_service() -> None:
    async with fleet(1) as f:
        stub = reflection_pb2_grpc.ServerReflectionStub(f.channel)
        ask = reflection_pb2.ServerReflectionRequest
        asked = (ask(list_services=""), ask(file_containing_symbol=SERVICE))
        services, file = [response async for response in stub.ServerReflectionInfo(iter(asked), timeout=60)]
        assert {s.name for s in services.list_services_response.service} >= {SERVICE, "grpc.health.v1.Health"}
        described = descriptor_pb2.FileDescriptorProto.FromString(file.file_descriptor_response.file_descriptor_proto[0])
        assert [m.name for s in described.service for m in s.method] == ["Generate", "GetModel"]


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    async with fleet(1) as f:
        with pytest.raises(PortTaken, match=f"port {f.port} on 127.0.0.1 is taken; choose another with --port"):
            await Gateway(lambda: []).start("127.0.0.1", f.port)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("203.0.113.5", "203.0.113.5 is not an address of this machine; choose another with --host"),
        ("2001:db8::5", "2001:db8::5 is not an address of this machine; choose another with --host"),
        ("nonexistent.invalid", "nonexistent.invalid is neither an address nor the name of one; choose another with --host"),
    ],
)
async def test_an_address_that_cannot_be_bound_is_not_told_as_a_taken_port(host: str, why: str) -> None:
    with pytest.raises(CannotListen, match=f"^{re.escape(why)}$") as error:
        await Gateway(lambda: []).start(host, 0)
    assert not isinstance(error.value, PortTaken)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_an_ipv6_address_can_be_bound() -> None:
    gateway = Gateway(lambda: [])
    port = await gateway.start("::1", 0)
    with socket.create_connection(("::1", port), timeout=60):
        pass
    with pytest.raises(PortTaken):
        await Gateway(lambda: []).start("::1", port)
    await gateway.stop(0)


async def test_stopping_lets_open_streams_end_and_takes_nothing_new() -> None:
    async with fleet(1) as f:
        call, decoder = await f.opened()
        stopping = asyncio.create_task(f.gateway.stop(60))
        with pytest.raises(grpc.aio.AioRpcError):
            while True:
                await f.answer()
        decoder.go_on.set()
        assert (await call.read()).usage.completion_tokens == 3
        await asyncio.wait_for(stopping, 60)
