from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGENT_STATE_UNSPECIFIED: _ClassVar[AgentState]
    AGENT_STATE_LOADING: _ClassVar[AgentState]
    AGENT_STATE_WARMING_UP: _ClassVar[AgentState]
    AGENT_STATE_SERVING: _ClassVar[AgentState]
    AGENT_STATE_DRAINING: _ClassVar[AgentState]
AGENT_STATE_UNSPECIFIED: AgentState
AGENT_STATE_LOADING: AgentState
AGENT_STATE_WARMING_UP: AgentState
AGENT_STATE_SERVING: AgentState
AGENT_STATE_DRAINING: AgentState

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("instance_id", "start_time", "state", "generation", "running", "waiting", "queued_prompt_tokens", "queued_output_tokens", "kv_bytes_used", "kv_bytes_total", "kv_bytes_cached", "arrived_requests", "arrived_prompt_tokens", "arrived_max_tokens", "prompt_tokens", "generated_tokens", "finished_requests", "failed_requests", "cancelled_requests", "rejected_requests", "cached_prompt_tokens", "proposed_tokens", "accepted_tokens", "preemptions", "busy_seconds", "finished_output_tokens", "objectives", "warm_up")
    class RejectedRequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_CACHED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    start_time: float
    state: AgentState
    generation: int
    running: int
    waiting: int
    queued_prompt_tokens: int
    queued_output_tokens: int
    kv_bytes_used: int
    kv_bytes_total: int
    kv_bytes_cached: int
    arrived_requests: int
    arrived_prompt_tokens: int
    arrived_max_tokens: int
    prompt_tokens: int
    generated_tokens: int
    finished_requests: int
    failed_requests: int
    cancelled_requests: int
    rejected_requests: _containers.ScalarMap[str, int]
    cached_prompt_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    preemptions: int
    busy_seconds: float
    finished_output_tokens: int
    objectives: _containers.RepeatedCompositeFieldContainer[ObjectiveCount]
    warm_up: WarmUp
    def __init__(self, instance_id: _Optional[str] = ..., start_time: _Optional[float] = ..., state: _Optional[_Union[AgentState, str]] = ..., generation: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., queued_output_tokens: _Optional[int] = ..., kv_bytes_used: _Optional[int] = ..., kv_bytes_total: _Optional[int] = ..., kv_bytes_cached: _Optional[int] = ..., arrived_requests: _Optional[int] = ..., arrived_prompt_tokens: _Optional[int] = ..., arrived_max_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., finished_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., cancelled_requests: _Optional[int] = ..., rejected_requests: _Optional[_Mapping[str, int]] = ..., cached_prompt_tokens: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., finished_output_tokens: _Optional[int] = ..., objectives: _Optional[_Iterable[_Union[ObjectiveCount, _Mapping]]] = ..., warm_up: _Optional[_Union[WarmUp, _Mapping]] = ...) -> None: ...

class ObjectiveCount(_message.Message):
    __slots__ = ("name", "good", "total", "threshold_seconds", "epoch", "observed_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    good: int
    total: int
    threshold_seconds: float
    epoch: int
    observed_seconds: float
    def __init__(self, name: _Optional[str] = ..., good: _Optional[int] = ..., total: _Optional[int] = ..., threshold_seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., observed_seconds: _Optional[float] = ...) -> None: ...

class WarmUp(_message.Message):
    __slots__ = ("load_seconds", "warm_up_seconds", "prefill_tokens_per_second", "curve", "curve_context_tokens")
    class CurvePoint(_message.Message):
        __slots__ = ("batch", "step_seconds", "tokens_per_second")
        BATCH_FIELD_NUMBER: _ClassVar[int]
        STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
        TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
        batch: int
        step_seconds: float
        tokens_per_second: float
        def __init__(self, batch: _Optional[int] = ..., step_seconds: _Optional[float] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    CURVE_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    load_seconds: float
    warm_up_seconds: float
    prefill_tokens_per_second: float
    curve: _containers.RepeatedCompositeFieldContainer[WarmUp.CurvePoint]
    curve_context_tokens: int
    def __init__(self, load_seconds: _Optional[float] = ..., warm_up_seconds: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ..., curve: _Optional[_Iterable[_Union[WarmUp.CurvePoint, _Mapping]]] = ..., curve_context_tokens: _Optional[int] = ...) -> None: ...

class Objective(_message.Message):
    __slots__ = ("name", "metric", "threshold_seconds", "target")
    class Metric(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        METRIC_UNSPECIFIED: _ClassVar[Objective.Metric]
        TIME_TO_FIRST_TOKEN: _ClassVar[Objective.Metric]
        TIME_PER_OUTPUT_TOKEN: _ClassVar[Objective.Metric]
        AVAILABILITY: _ClassVar[Objective.Metric]
        REQUEST_DURATION: _ClassVar[Objective.Metric]
        QUEUE_TIME: _ClassVar[Objective.Metric]
    METRIC_UNSPECIFIED: Objective.Metric
    TIME_TO_FIRST_TOKEN: Objective.Metric
    TIME_PER_OUTPUT_TOKEN: Objective.Metric
    AVAILABILITY: Objective.Metric
    REQUEST_DURATION: Objective.Metric
    QUEUE_TIME: Objective.Metric
    NAME_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    name: str
    metric: Objective.Metric
    threshold_seconds: float
    target: float
    def __init__(self, name: _Optional[str] = ..., metric: _Optional[_Union[Objective.Metric, str]] = ..., threshold_seconds: _Optional[float] = ..., target: _Optional[float] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("generation", "objectives", "max_waiting", "drain_timeout_seconds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    objectives: _containers.RepeatedCompositeFieldContainer[Objective]
    max_waiting: int
    drain_timeout_seconds: float
    def __init__(self, generation: _Optional[int] = ..., objectives: _Optional[_Iterable[_Union[Objective, _Mapping]]] = ..., max_waiting: _Optional[int] = ..., drain_timeout_seconds: _Optional[float] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running", "waiting")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...
