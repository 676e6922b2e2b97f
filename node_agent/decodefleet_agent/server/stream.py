"""One admitted request: its sequences in the engine, the messages of its stream, and its times."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc

from decodefleet.v1 import decoding_pb2 as pb
from decodefleet_agent.messages import Output, Submit
from decodefleet_agent.server.agent import Agent
from decodefleet_agent.server.engine_link import EngineLink, Inbox
from decodefleet_agent.server.errors import Refused
from decodefleet_agent.server.objectives import Measured
from decodefleet_agent.server.requests import Work
from decodefleet_agent.server.samples import Sample, merge


class RequestStream:
    """`responses` yields start, deltas, usage; `close` frees what the engine still holds, whatever happened. Monotonic seconds."""

    def __init__(self, work: Work, agent: Agent, link: EngineLink, arrived: float) -> None:
        self._work, self._agent, self._link = work, agent, link
        self._arrived = arrived
        self._first: float | None = None
        self._last: float | None = None
        self._scheduled: float | None = None
        self._cached = 0
        self._new_tokens = [0] * len(work.samples)  # without those that a resumed stream had
        self._samples: dict[int, Sample] = {}  # by sequence id
        self._order: dict[int, int] = {}  # sequence id -> position in work.samples

    @property
    def completion_tokens(self) -> int:
        return sum(sample.tokens for sample in self._samples.values())

    async def responses(self) -> AsyncIterator[pb.GenerateResponse]:
        """Raises Refused, or what the engine's end was."""
        assert self._agent.model is not None
        # A stop string should end the stream's sequences with the token that completes it.
        inbox = Inbox(0.0 if self._work.stops else self._work.message_interval)
        resumed: list[pb.SampleDelta] = []
        for position, sampling in enumerate(self._work.samples):
            sequence_id = self._link.next_id()
            sample = Sample(sampling, self._agent.model.tokenizer.token_bytes, self._work.stops)
            self._samples[sequence_id], self._order[sequence_id] = sample, position
            if self._work.output_ids and (delta := sample.resume(self._work.output_ids, self._work.emitted_bytes)) is not None:
                resumed.append(delta)
            if not sample.finished:
                submit = Submit(sequence_id, self._work.prompt_ids, sampling, list(self._work.output_ids), self._work.priority)
                self._link.submit(submit, inbox)

        if resumed:
            yield self._start()
            yield pb.GenerateResponse(deltas=resumed)
        started = bool(resumed)
        while not all(sample.finished for sample in self._samples.values()):
            deltas = [delta for output in await inbox.take() if (delta := self._feed(output)) is not None]
            # The start goes out with the first token, not before: until then another replica may still serve the request.
            if deltas and not started:
                yield self._start()
                started = True
            if deltas:
                yield pb.GenerateResponse(deltas=merge(deltas))
        yield pb.GenerateResponse(usage=self._usage())

    def _feed(self, output: Output) -> pb.SampleDelta | None:
        if output.finish == "error":
            raise Refused(grpc.StatusCode.INTERNAL, output.error or "the engine failed on this request")
        sample = self._samples[output.sequence_id]
        if sample.finished:
            return None
        if output.scheduled_at is not None:
            self._scheduled = min(self._scheduled or output.scheduled_at, output.scheduled_at)
        if output.cached_prompt_tokens is not None:
            self._cached = max(self._cached, output.cached_prompt_tokens)
        before = sample.tokens
        delta = sample.feed(output)
        if sample.tokens > before:
            self._new_tokens[self._order[output.sequence_id]] += sample.tokens - before
            self._last = time.monotonic()
            self._first = self._first or self._last
        if sample.finished:
            self._link.cancel(output.sequence_id)
        return delta if delta.token_ids or delta.text or delta.finish_reason else None

    def close(self) -> None:
        for sequence_id in self._samples:
            self._link.cancel(sequence_id)

    def measure(self) -> Measured:
        now = time.monotonic()
        longest = max(self._new_tokens)
        per_token = open_per_token = None
        if self._first is not None and self._last is not None:
            per_token = (self._last - self._first) / (longest - 1) if longest > 1 else None
            open_per_token = (now - self._first) / longest
        return Measured(
            duration=now - self._arrived,
            queue_time=_since(self._arrived, self._scheduled),
            time_to_first_token=_since(self._arrived, self._first),
            time_per_output_token=per_token,
            open_time_per_output_token=open_per_token,
        )

    def _start(self) -> pb.GenerateResponse:
        assert self._agent.model is not None
        return pb.GenerateResponse(
            start=pb.StreamStart(
                request_id=self._work.request_id,
                seed=self._work.seed,
                numerics_profile=self._agent.model.info.numerics_profile,
                instance_id=self._agent.instance_id,
            )
        )

    def _usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(self._work.prompt_ids),
            completion_tokens=self.completion_tokens,
            cached_prompt_tokens=self._cached,
            time_to_first_token=_since(self._arrived, self._first) or 0.0,
            decode_time=(self._last - self._first) if self._first is not None and self._last is not None else 0.0,
            queue_time=_since(self._arrived, self._scheduled) or 0.0,
        )


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else max(0.0, end - start)
