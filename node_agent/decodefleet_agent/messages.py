"""What the server process and the engine process tell each other: one message per step in each direction, as msgpack."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True):
    """Sampling of one sequence, checked by the server; defaults are those of the proto."""

    seed: int
    sample_index: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # the model's end-of-text tokens included, unless ignore_eos
    max_tokens: int = 256
    logprobs: int | None = None  # alternatives per token


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A sequence to decode. `output_ids` are tokens that it generated elsewhere (resume)."""

    sequence_id: int
    prompt_ids: list[int]
    sampling: Sampling
    output_ids: list[int] = []
    priority: int = 0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client left, its deadline passed, or a stop string ended the sequence: free its pages before the next step."""

    sequence_id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the engine process."""


class Targets(msgspec.Struct, frozen=True, tag="targets"):
    """Latencies to keep from now on, seconds; None where there is no objective."""

    time_per_output_token: float | None = None
    time_to_first_token: float | None = None


class Commands(msgspec.Struct, frozen=True):
    """Server to engine."""

    items: list[Submit | Cancel | Targets | Stop]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one step brought one sequence."""

    sequence_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    finish: str | None = None  # "stop", "length" or "error"; the last output of the sequence
    error: str | None = None  # with "error": what to tell the client
    cached_prompt_tokens: int | None = None  # in the sequence's first output
    scheduled_at: float | None = None  # in the first output: time.monotonic() at which it left the queue


class Stats(msgspec.Struct, frozen=True):
    """The engine's numbers after a step. Counters are since start."""

    running: int = 0
    waiting: int = 0
    queued_prompt_tokens: int = 0
    queued_output_tokens: int = 0
    kv_bytes_used: int = 0
    kv_bytes_total: int = 0
    kv_bytes_cached: int = 0
    prompt_tokens: int = 0  # computed, the cached ones excluded
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    backend_seconds: float = 0.0  # of the busy ones, those that the backend took
    step_seconds: float = 0.0  # of this step
    batch: int = 0  # sequences in this step
    batch_tokens: int = 0  # rows in this step
    batch_limit: int = 0  # sequences that the controller lets run
    prefill_limit: int = 0  # prompt tokens that it lets into a step


class CurvePoint(msgspec.Struct, frozen=True):
    batch: int
    step_seconds: float
    tokens_per_second: float


class MixedPoint(msgspec.Struct, frozen=True):
    """A step of `batch` sequences that decode at `context`, beside `chunk` tokens of a prompt that follow `start` others."""

    batch: int
    context: int
    chunk: int
    start: int
    step_seconds: float


class ModelInfo(msgspec.Struct, frozen=True):
    architecture: str
    parameters: int
    context_length: int  # max_context applied
    vocabulary_size: int
    numerics_profile: str
    weights_format: str
    eos_token_ids: list[int]
    kv_page_tokens: int
    kv_pages: int
    backend: str = ""
    kv_format: str = ""
    instructions: str = ""  # the processor's instruction sets that the backend uses


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up. `phase` is loading or warming_up, `done` a share in [0, 1]."""

    phase: str
    done: float
    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is warm."""

    model: ModelInfo
    load_seconds: float
    warm_up_seconds: float | None
    prefill_tokens_per_second: float | None
    curve: list[CurvePoint]
    curve_context: int = 0  # tokens that each sequence of the curve attended to
    mixed: list[MixedPoint] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start; the message says what to change. The process exits after it."""

    message: str


class StepResult(msgspec.Struct, frozen=True, tag="step"):
    """Engine to server, after each step, and after commands that freed something."""

    outputs: list[Output]
    stats: Stats


EngineMessage = Progress | Ready | Failed | StepResult
