"""What a node agent is told when it starts. The engine's part is also `spec.engine` of a DecoderDeployment."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from decodefleet.units import Duration, Quantity


class Model(BaseModel):
    """Base of every type in the contract: camelCase outside, snake_case inside, immutable, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class NumberFormat(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"
    int8 = "int8"
    int4 = "int4"


class PrecisionSchedule(StrEnum):
    Static = "Static"
    ByComplexity = "ByComplexity"


class Precision(Model):
    """Number formats of the engine's parts."""

    weights: NumberFormat = Field(NumberFormat.auto, description="Format of the weights; auto keeps the one of the model's file.")
    attention: NumberFormat = Field(NumberFormat.auto, description="Format that attention computes in.")
    kv_cache: Literal["auto", "int8", "fp8", "bf16", "fp32"] = Field(
        "auto", description="Format of cached keys and values; auto is the default of the backend."
    )
    schedule: PrecisionSchedule = Field(
        PrecisionSchedule.Static, description="Whether precision follows the measured complexity of a request."
    )


class SparsityPolicy(StrEnum):
    None_ = "None"
    SlidingWindow = "SlidingWindow"
    Hierarchical = "Hierarchical"


class Sparsity(Model):
    """Which cached tokens a decode step attends to."""

    policy: SparsityPolicy = Field(SparsityPolicy.None_, description="None attends to all of them and is exact.")
    sinks: int = Field(16, ge=0, le=4096, description="First tokens that are always attended to.")
    window: int = Field(256, ge=16, le=131072, description="Last tokens that are always attended to.")
    budget_tokens: int = Field(512, ge=16, le=131072, description="Tokens that Hierarchical picks of the rest.")


class KVCache(Model):
    """The pool that holds keys and values of all sequences."""

    memory: Quantity | None = Field(
        None,
        description="Size of the pool, allocated once at start. "
        "Absent: what maxBatch sequences of the model's context need, at most a quarter of the pod's memory.",
    )
    page_tokens: int = Field(16, ge=16, le=16, description="Tokens in a page.")
    sparsity: Sparsity = Field(default_factory=Sparsity, description="Which cached tokens a decode step attends to.")


class BatchController(StrEnum):
    SLAFeedback = "SLAFeedback"
    Static = "Static"
    DQN = "DQN"


class Batching(Model):
    """How many sequences run together, and how prompts are cut."""

    controller: BatchController = Field(
        BatchController.SLAFeedback,
        description="Who sets the batch size between 1 and maxBatch. Static: always maxBatch. "
        "SLAFeedback: as many sequences as keep the objective for TimePerOutputToken, by the measured cost of steps.",
    )
    max_batch: int = Field(64, ge=1, le=1024, description="Sequences that run at once.")
    batch_size_threshold: int = Field(8, ge=1, le=1024, description="Sequences that wait for free places at which prefill goes first.")
    max_batch_tokens: int = Field(2048, ge=16, le=131072, description="Tokens in one step, decode and prefill together.")
    chunk: Annotated[str, Field(pattern=r"^(Dynamic|Formula|None|[1-9][0-9]{0,5})$", max_length=7)] = Field(
        "Dynamic",
        description="Tokens of a prompt that one step computes. Dynamic: by the measured cost, so that sequences that decode keep "
        "their pace. A number, None for whole prompts, or Formula. Prompts below 512 tokens are never cut.",
    )
    max_waiting: int = Field(256, ge=0, le=100000, description="Requests that may wait; one more is answered RESOURCE_EXHAUSTED.")


class PredictionMethod(StrEnum):
    None_ = "None"
    Suffix = "Suffix"
    Medusa = "Medusa"


class Prediction(Model):
    """Drafting of tokens that one step verifies together."""

    method: PredictionMethod = Field(PredictionMethod.None_, description="Where drafts come from.")
    max_tokens: int = Field(8, ge=1, le=64, description="Longest draft.")


class Warmup(Model):
    """What the engine does before it reports ready."""

    enabled: bool = Field(
        True, description="Run and measure each batch size once before serving. False serves at once, with capacity unknown."
    )


class Engine(Model):
    """The decoding engine of each replica."""

    precision: Precision = Field(default_factory=Precision, description="Number formats.")
    kv_cache: KVCache = Field(default_factory=KVCache, description="The pool of keys and values.")
    batching: Batching = Field(default_factory=Batching, description="Batch size and prompt chunks.")
    prediction: Prediction = Field(default_factory=Prediction, description="Predicted tokens.")
    warmup: Warmup = Field(default_factory=Warmup, description="Warm-up before serving.")
    max_context: int | None = Field(None, ge=16, le=1048576, description="Longest prompt and output together; absent: the model's own.")


class TLS(Model):
    """Files of the serving port's certificate; they are read again when they change."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = Field(None, description="Demands client certificates that this authority signed.")


class AgentConfig(Model):
    """All that an agent is started with, as JSON in the file that `--config` names or in DECODEFLEET_CONFIG.

    Ports of 0 are drawn by the system; the agent writes those it got to `ports_file`.
    """

    model_uri: str = Field(max_length=1024)
    engine: Engine = Field(default_factory=Engine)
    tensor_parallel: int = Field(1, ge=1)
    cpu: Quantity | None = Field(None, description="The pod's CPU limit, cores; threads never exceed it.")
    memory: Quantity | None = None
    host: str = "0.0.0.0"
    serving_port: int = 50051
    control_port: int = 50052
    http_port: int = 8080
    ports_file: str | None = Field(None, description="Where the agent writes {serving, control, http} once all are bound.")
    control_token_file: str | None = Field(
        None, description="The fleet's token. Without it (and without control_tls) AgentControl is not served."
    )
    tls: TLS | None = None
    control_tls: TLS | None = None
    drain_timeout: Duration = "120s"
    request_log: str | None = Field(
        None,
        description="File that gets one JSON line per request, with its id and how it ended. Absent: DECODEFLEET_REQUEST_LOG names it.",
    )
