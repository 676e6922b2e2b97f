"""decodefleet.v1.Decoding: one handler per stream, from the checked request to the usage in the last message."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from decodefleet.metadata import ENGINE_DIED
from decodefleet.v1 import decoding_pb2 as pb
from decodefleet.v1 import decoding_pb2_grpc
from decodefleet_agent.server.agent import Agent, Phase
from decodefleet_agent.server.engine_link import EngineDied, EngineLink
from decodefleet_agent.server.errors import Refused, unavailable
from decodefleet_agent.server.objectives import Measured, Outcome
from decodefleet_agent.server.requests import Work, read_request
from decodefleet_agent.server.stream import RequestStream

log = logging.getLogger(__name__)

# A client that gives up at its deadline cancels the call before the deadline passes here: by the time that the call took to arrive,
# which is long where a CPU limit throttles the agent. The slack is this, or this share of the client's deadline.
_DEADLINE_SLACK, _DEADLINE_SHARE = 0.25, 0.1


class Decoding(decoding_pb2_grpc.DecodingServicer):
    """Serves streams from the engine behind `link`."""

    def __init__(self, agent: Agent, link: EngineLink) -> None:
        self._agent, self._link = agent, link

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        arrived = time.monotonic()
        self._agent.calls += 1
        try:
            work = await self._admit(request, arrived)
        except Refused as refusal:
            self._agent.metrics.rejected.labels(refusal.reason).inc()
            if self._agent.phase is Phase.DRAINING:
                await self._agent.told_to_go.wait()
            await _abort(context, refusal)
            return
        failure = await self._serve(work, context, arrived)
        if failure is not None:
            await _abort(context, failure)

    async def _admit(self, request: pb.GenerateRequest, arrived: float) -> Work:
        work = await read_request(request, self._agent.serving_model())
        self._agent.serving_model()  # it may have begun to drain while a long prompt was tokenised
        try:
            self._agent.admit(work)
        except Refused as refusal:
            if refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._agent.reject(work, Measured(duration=time.monotonic() - arrived), refusal.message)
            raise
        return work

    async def _serve(self, work: Work, context: grpc.aio.ServicerContext, arrived: float) -> Refused | None:
        """Runs the stream to its end; what to abort the call with, if it does not end well."""
        stream = RequestStream(work, self._agent, self._link, arrived)
        outcome, error = Outcome.failed, None
        deadline = context.time_remaining()
        try:
            async with asyncio.timeout(deadline):
                async for response in stream.responses():
                    await context.write(response)
            outcome = Outcome.finished
            return None
        except TimeoutError:
            outcome, error = Outcome.deadline, "the deadline passed"
            return Refused(grpc.StatusCode.DEADLINE_EXCEEDED, f"the deadline passed after {stream.completion_tokens} tokens")
        except asyncio.CancelledError:
            outcome = Outcome.deadline if deadline is not None and _at_deadline(deadline, arrived) else Outcome.cancelled
            raise
        except EngineDied as death:
            error = str(death)
            return unavailable(f"the engine died: {death}", ENGINE_DIED)
        except Refused as refusal:
            error = refusal.message
            outcome = Outcome.failed
            return refusal
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            log.exception("request=%s failed", work.request_id)
            return Refused(grpc.StatusCode.INTERNAL, f"the agent failed: {error}")
        finally:
            stream.close()
            self._agent.leave(work, outcome, stream.measure(), stream.completion_tokens, error)

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        if (model := self._agent.model) is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the agent is not ready: {self._agent.progress}")
            return pb.GetModelResponse()
        info, template = model.info, model.tokenizer.chat_template
        return pb.GetModelResponse(
            uri=self._agent.config.model_uri,
            architecture=info.architecture,
            parameters=info.parameters,
            context_length=info.context_length,
            vocabulary_size=info.vocabulary_size,
            numerics_profile=info.numerics_profile,
            weights_format=info.weights_format,
            chat_template=template.source if template else "",
            eos_token_ids=info.eos_token_ids,
            config_json=self._agent.config.model_dump_json(by_alias=True, exclude={"control_token_file", "tls", "control_tls"}),
        )


def _at_deadline(deadline: float, arrived: float) -> bool:
    """Whether a call of this deadline (seconds from its arrival) was cancelled because of it."""
    return deadline - (time.monotonic() - arrived) < max(_DEADLINE_SLACK, _DEADLINE_SHARE * deadline)


async def _abort(context: grpc.aio.ServicerContext, refusal: Refused) -> None:
    """Ends the call; with a delay, the status carries google.rpc.RetryInfo."""
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    if refusal.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(refusal.retry_after * 1000))
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=refusal.message, details=[detail])
        trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    if refusal.reason == ENGINE_DIED:
        trailing += ((ENGINE_DIED, "1"),)
    await context.abort(refusal.code, refusal.message, trailing)
