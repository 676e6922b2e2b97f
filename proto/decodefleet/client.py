"""A thin client of decodefleet.v1.Decoding, plain and asyncio: balances over replicas, and asks another one when one is leaving."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from decodefleet.metadata import ENGINE_DIED, MAX_DEATHS
from decodefleet.v1 import decoding_pb2 as pb
from decodefleet.v1 import decoding_pb2_grpc

MAX_RETRIES = 3
_OPTIONS = (
    # A headless Service resolves to every replica; one connection to each, taken in turn.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    # Silent connections through NAT and load balancers are noticed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
_FIRST_PAUSE = 0.1  # seconds; doubles with each retry

Input = str | Sequence[tuple[str, str]] | Sequence[int]


@dataclass
class Result:
    """A stream that was taken to its end; lists are by sample. `retries`: how often another attempt was needed before the first message."""

    request_id: str = ""
    seed: int = 0
    numerics_profile: str = ""
    instance_id: str = ""
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    finish_reasons: list[pb.FinishReason] = field(default_factory=list)
    usage: pb.Usage | None = None
    retries: int = 0

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.texts[0] if self.texts else ""

    def add(self, response: pb.GenerateResponse) -> None:
        if response.HasField("start"):
            start = response.start
            self.request_id, self.seed = start.request_id, start.seed
            self.numerics_profile, self.instance_id = start.numerics_profile, start.instance_id
        for delta in response.deltas:
            while len(self.texts) <= delta.sample_index:
                self.texts.append("")
                self.token_ids.append([])
                self.finish_reasons.append(pb.FINISH_REASON_UNSPECIFIED)
            self.texts[delta.sample_index] += delta.text
            self.token_ids[delta.sample_index] += delta.token_ids
            self.finish_reasons[delta.sample_index] = delta.finish_reason
        if response.HasField("usage"):
            self.usage = response.usage


def build_request(
    prompt: Input, *, request_id: str = "", priority: int = 0, message_interval: float = 0.0, **sampling: Any
) -> pb.GenerateRequest:
    """A str is raw text, (role, content) pairs are chat messages, ints are token ids; `sampling` holds fields of Sampling.

    Raises ValueError for a field that Sampling does not have.
    """
    unknown = sampling.keys() - pb.Sampling.DESCRIPTOR.fields_by_name.keys()
    if unknown:
        known = ", ".join(pb.Sampling.DESCRIPTOR.fields_by_name)
        raise ValueError(f"{', '.join(sorted(unknown))}: not a field of Sampling; it has {known}")
    given = {name: value for name, value in sampling.items() if value is not None}
    request = pb.GenerateRequest(
        request_id=request_id, priority=priority, message_interval=message_interval, sampling=pb.Sampling(**given)
    )
    if isinstance(prompt, str):
        request.prompt = prompt
        return request
    for item in prompt:
        if isinstance(item, int):
            request.token_ids.ids.append(item)
        else:
            role, content = item
            request.chat.messages.add(role=role, content=content)
    return request


# A request that crosses the GOAWAY of a draining replica on the wire comes back as CANCELLED; our own cancellations never get here.
_ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class _Attempts:
    """Whether a request of whose stream nothing has come is sent again: another replica may serve it from the start."""

    def __init__(self) -> None:
        self.retries = 0
        self._deaths = 0

    def pause(self, error: grpc.RpcError) -> float:
        """Seconds until the next attempt. Raises the error where there is none."""
        self._deaths += any(key == ENGINE_DIED for key, _ in error.trailing_metadata() or ())
        if error.code() not in _ELSEWHERE or self.retries == MAX_RETRIES or self._deaths == MAX_DEATHS:
            raise error
        self.retries += 1
        return _FIRST_PAUSE * 2 ** (self.retries - 1) * random.uniform(0.5, 1.0)


class Client:
    """`target` is host:port, or with a scheme such as dns:///fleet:50051. Thread-safe. `retries` counts those of all its requests."""

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=_OPTIONS)
        self._stub = decoding_pb2_grpc.DecodingStub(self._channel)
        self.retries = 0

    def stream(
        self, request: pb.GenerateRequest, *, timeout: float | None = None, result: Result | None = None
    ) -> Iterator[pb.GenerateResponse]:
        """The responses as they come; closing the iterator cancels the request. `result` is filled along the way. Raises grpc.RpcError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        attempts = _Attempts()
        while True:
            call = self._stub.Generate(request, timeout=None if deadline is None else deadline - time.monotonic())
            started = False
            try:
                for response in call:
                    started = True
                    if result is not None:
                        result.add(response)
                    yield response
                return
            except grpc.RpcError as error:
                if started:
                    raise
                pause = attempts.pause(error)
            finally:
                call.cancel()
            self.retries += 1
            if result is not None:
                result.retries += 1
            time.sleep(pause)

    def generate(self, prompt: Input, *, timeout: float | None = None, **fields: Any) -> Iterator[str]:
        """The first sample's text, piece by piece. `fields` as in build_request."""
        for response in self.stream(build_request(prompt, **fields), timeout=timeout):
            for delta in response.deltas:
                if delta.sample_index == 0 and delta.text:
                    yield delta.text

    def complete(self, prompt: Input, *, timeout: float | None = None, **fields: Any) -> Result:
        """The whole answer."""
        result = Result()
        for _ in self.stream(build_request(prompt, **fields), timeout=timeout, result=result):
            pass
        return result

    def model(self, *, timeout: float | None = None) -> pb.GetModelResponse:
        return self._stub.GetModel(pb.GetModelRequest(), timeout=timeout)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self._stub = decoding_pb2_grpc.DecodingStub(self._channel)
        self.retries = 0

    async def stream(
        self, request: pb.GenerateRequest, *, timeout: float | None = None, result: Result | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The responses as they come; closing the iterator cancels the request. `result` is filled along the way. Raises grpc.RpcError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        attempts = _Attempts()
        while True:
            call = self._stub.Generate(request, timeout=None if deadline is None else deadline - time.monotonic())
            started = False
            try:
                async for response in call:
                    started = True
                    if result is not None:
                        result.add(response)
                    yield response
                return
            except grpc.RpcError as error:
                if started:
                    raise
                pause = attempts.pause(error)
            finally:
                call.cancel()
            self.retries += 1
            if result is not None:
                result.retries += 1
            await asyncio.sleep(pause)

    async def generate(self, prompt: Input, *, timeout: float | None = None, **fields: Any) -> AsyncIterator[str]:
        """The first sample's text, piece by piece. `fields` as in build_request."""
        async for response in self.stream(build_request(prompt, **fields), timeout=timeout):
            for delta in response.deltas:
                if delta.sample_index == 0 and delta.text:
                    yield delta.text

    async def complete(self, prompt: Input, *, timeout: float | None = None, **fields: Any) -> Result:
        """The whole answer."""
        result = Result()
        async for _ in self.stream(build_request(prompt, **fields), timeout=timeout, result=result):
            pass
        return result

    async def model(self, *, timeout: float | None = None) -> pb.GetModelResponse:
        return await self._stub.GetModel(pb.GetModelRequest(), timeout=timeout)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
