"""A GenerateRequest, checked: every refusal names the field, its value and the limit."""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from msgspec.structs import replace

from decodefleet.v1 import decoding_pb2 as pb
from decodefleet_agent.messages import ModelInfo, Sampling
from decodefleet_agent.server.errors import Refused, invalid
from decodefleet_agent.server.samples import Sample
from decodefleet_agent.text.errors import TextError
from decodefleet_agent.text.tokenizer import Tokenizer

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_ID_LENGTH = 128
MAX_MESSAGE_INTERVAL = 1.0  # seconds
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
DEFAULT_MAX_TOKENS = 256
ROLES = ("system", "user", "assistant")
_LONG_TEXT = 20_000  # characters from which tokenisation would hold up the other streams
_COMPOSITION = 4  # normalisation makes a text shorter by less than this
_long_texts = asyncio.Semaphore(1)  # tokenised at once


@dataclass(frozen=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer

    @property
    def token_limit(self) -> int:
        """Tokens of prompt and output together; the engine has said what its KV pool holds."""
        return self.info.context_length


@dataclass(frozen=True)
class Work:
    """A request that may go to the engine: one `Sampling` per sample. `output_ids`, `emitted_bytes`: what a resumed stream has."""

    request_id: str
    prompt_ids: list[int]
    samples: tuple[Sampling, ...]
    stops: tuple[str, ...]
    priority: int
    output_ids: tuple[int, ...] = ()
    emitted_bytes: int = 0
    message_interval: float = 0.0  # seconds

    @property
    def seed(self) -> int:
        return self.samples[0].seed

    @property
    def max_tokens(self) -> int:
        """Of all samples together."""
        return sum(sampling.max_tokens for sampling in self.samples)


async def read_request(request: pb.GenerateRequest, model: ServedModel) -> Work:
    """Raises Refused: INVALID_ARGUMENT, or FAILED_PRECONDITION for a resume under another numerics profile."""
    if len(request.request_id) > MAX_ID_LENGTH:
        raise invalid(f"request_id: has {len(request.request_id)} characters; at most {MAX_ID_LENGTH} are allowed")
    if not 0 <= request.message_interval <= MAX_MESSAGE_INTERVAL:
        raise invalid(f"message_interval: is {request.message_interval:g}; it must be in [0, {MAX_MESSAGE_INTERVAL:g}]")
    _check_sampling(request.sampling, model.info.vocabulary_size)
    samples = request.sampling.n if request.sampling.HasField("n") else 1
    resume = request.resume if request.HasField("resume") else None
    if resume is not None:
        _check_resume(resume, request.sampling, samples, model.info)

    prompt_ids = await _prompt_ids(request, model)
    used = len(prompt_ids) + (len(resume.token_ids) if resume else 0)
    if len(prompt_ids) >= model.token_limit:
        raise invalid(f"prompt: has {len(prompt_ids)} tokens; this model takes at most {model.token_limit - 1}, so that one can follow")
    if resume is not None and used > model.token_limit:
        raise invalid(f"resume.token_ids: prompt and resumed output have {used} tokens; this model holds {model.token_limit}")

    sampling = _sampling(request.sampling, model, len(prompt_ids), resume)
    if resume is not None:
        _check_emitted(resume, sampling, model, list(request.sampling.stop))
    return Work(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        samples=tuple(replace(sampling, sample_index=index) for index in range(samples)) if resume is None else (sampling,),
        stops=tuple(request.sampling.stop),
        priority=request.priority,
        output_ids=tuple(resume.token_ids) if resume else (),
        emitted_bytes=resume.emitted_bytes if resume else 0,
        message_interval=request.message_interval,
    )


async def _prompt_ids(request: pb.GenerateRequest, model: ServedModel) -> list[int]:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        _check_size("prompt", len(request.prompt.encode()), model)
        ids = await _encode(model.tokenizer.encode, request.prompt, len(request.prompt))
        if not ids:
            raise invalid("prompt: is empty; this model needs at least one token")
        return ids
    if kind == "chat":
        return await _chat_ids(request.chat, model)
    if kind == "token_ids":
        ids = list(request.token_ids.ids)
        if not ids:
            raise invalid("token_ids: is empty; at least one token is needed")
        _check_ids("token_ids", ids, model.info.vocabulary_size)
        return ids
    raise invalid("input: is not set; set one of prompt, chat, token_ids")


async def _chat_ids(chat: pb.Chat, model: ServedModel) -> list[int]:
    if not chat.messages:
        raise invalid("chat.messages: is empty; at least one message is needed")
    for at, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise invalid(f"chat.messages[{at}].role: is {message.role!r}; allowed are {', '.join(ROLES)}")
    _check_size("chat.messages", sum(len(message.content.encode()) for message in chat.messages), model)
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        ids = await _encode(model.tokenizer.encode_chat, messages, sum(len(message.content) for message in chat.messages))
    except TextError as error:
        raise invalid(f"chat: {error}") from error
    if not ids:
        raise invalid("chat: the model's template makes an empty prompt of these messages")
    return ids


async def _encode(encode: Callable[[Any], list[int]], text: Any, length: int) -> list[int]:
    if length <= _LONG_TEXT:
        return encode(text)
    async with _long_texts:
        return await asyncio.to_thread(encode, text)


def _check_size(field: str, size: int, model: ServedModel) -> None:
    """Refuses what cannot fit however it is cut into tokens, before the time is spent on it."""
    most = model.token_limit * model.tokenizer.longest_token * _COMPOSITION
    if size > most:
        raise invalid(f"{field}: has {size} bytes, too many for the {model.token_limit} tokens that this model holds; send at most {most}")


def _check_ids(field: str, ids: list[int], vocabulary: int) -> None:
    for at, token_id in enumerate(ids):
        if token_id >= vocabulary:
            raise invalid(f"{field}[{at}]: is {token_id}; the vocabulary has {vocabulary} tokens, so ids are below that")


def _check_sampling(sampling: pb.Sampling, vocabulary: int) -> None:
    # field, lowest, highest, whether the lowest itself is allowed
    for field, low, high, closed in (
        ("temperature", 0.0, MAX_TEMPERATURE, True),
        ("top_p", 0.0, 1.0, False),
        ("min_p", 0.0, 1.0, True),
        ("repetition_penalty", 0.0, MAX_REPETITION_PENALTY, False),
        ("presence_penalty", -2.0, 2.0, True),
        ("frequency_penalty", -2.0, 2.0, True),
        ("max_tokens", 1, math.inf, True),
        ("logprobs", 0, MAX_LOGPROBS, True),
        ("n", 1, MAX_SAMPLES, True),
    ):
        if not sampling.HasField(field):
            continue
        value = getattr(sampling, field)
        if math.isnan(value) or math.isinf(value) or value > high or value < low or (value == low and not closed):
            bound = f"at least {low}" if high == math.inf else f"in {'[' if closed else '('}{low}, {high}]"
            raise invalid(f"sampling.{field}: is {value:g}; it must be {bound}")

    if len(sampling.stop) > MAX_STOPS:
        raise invalid(f"sampling.stop: has {len(sampling.stop)} strings; at most {MAX_STOPS} are allowed")
    for at, stop in enumerate(sampling.stop):
        size = len(stop.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            raise invalid(f"sampling.stop[{at}]: has {size} bytes; it must have 1 to {MAX_STOP_BYTES}")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid(f"sampling.stop_token_ids: has {len(sampling.stop_token_ids)} tokens; at most {MAX_STOP_TOKENS} are allowed")
    _check_ids("sampling.stop_token_ids", list(sampling.stop_token_ids), vocabulary)


def _check_resume(resume: pb.Resume, sampling: pb.Sampling, samples: int, info: ModelInfo) -> None:
    if resume.numerics_profile and resume.numerics_profile != info.numerics_profile:
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"resume.numerics_profile: is {resume.numerics_profile!r}; this replica's is {info.numerics_profile!r}",
            reason="numerics_profile",
        )
    if samples != 1:
        raise invalid(f"sampling.n: is {samples}; a resumed stream is one sample, chosen by resume.sample_index")
    if resume.sample_index >= MAX_SAMPLES:
        raise invalid(f"resume.sample_index: is {resume.sample_index}; it must be below {MAX_SAMPLES}")
    if sampling.HasField("seed") and sampling.seed != resume.seed:
        raise invalid(f"sampling.seed: is {sampling.seed}; the resumed stream's seed is {resume.seed}")
    _check_ids("resume.token_ids", list(resume.token_ids), info.vocabulary_size)


def _check_emitted(resume: pb.Resume, sampling: Sampling, model: ServedModel, stops: list[str]) -> None:
    try:
        Sample(sampling, model.tokenizer.token_bytes, stops).resume(list(resume.token_ids), resume.emitted_bytes)
    except ValueError as error:
        raise invalid(str(error)) from error


def _sampling(asked: pb.Sampling, model: ServedModel, prompt_tokens: int, resume: pb.Resume | None) -> Sampling:
    room = model.token_limit - prompt_tokens
    given = {
        field: getattr(asked, field)
        for field in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs")
        if asked.HasField(field)
    }
    eos = [] if asked.ignore_eos else model.info.eos_token_ids
    drawn = asked.seed if asked.HasField("seed") else secrets.randbits(63)
    return Sampling(
        seed=resume.seed if resume else drawn,
        sample_index=resume.sample_index if resume else 0,
        stop_token_ids=tuple(dict.fromkeys([*eos, *asked.stop_token_ids])),
        max_tokens=min(asked.max_tokens if asked.HasField("max_tokens") else DEFAULT_MAX_TOKENS, room),
        **given,
    )

