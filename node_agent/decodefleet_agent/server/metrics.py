"""All numbers of the agent, in one registry: /metrics writes it out, GetLoad reads it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from decodefleet_agent.messages import Ready, Stats
from decodefleet_agent.server.objectives import Measured, Outcome

# OpenTelemetry's buckets for generative models (gen_ai.server.*).
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# Engine counter -> (metric, help); the metric's `_total` follows the engine's count since its start.
_ENGINE_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed, those from the prefix cache excluded."),
    "cached_prompt_tokens": ("cached_prompt_tokens", "Prompt tokens that the prefix cache served."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
    "proposed_tokens": ("proposed_tokens", "Draft tokens that were verified."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted."),
    "preemptions": ("preemptions", "Sequences that gave up their pages to others."),
    "steps": ("steps", "Steps of the engine."),
    "busy_seconds": ("busy_seconds", "Seconds that the engine spent in steps."),
    "backend_seconds": ("backend_seconds", "Seconds of them that the backend computed."),
}
_ENGINE_GAUGES = {
    "queued_prompt_tokens": ("queued_prompt_tokens", "Prompt tokens not yet computed, of waiting and running sequences."),
    "queued_output_tokens": ("queued_output_tokens", "Tokens that waiting and running sequences may still generate."),
    "kv_bytes_used": ("kv_used_bytes", "Bytes of the KV pool held by sequences."),
    "kv_bytes_total": ("kv_total_bytes", "Bytes of the KV pool."),
    "kv_bytes_cached": ("kv_cached_bytes", "Bytes of the KV pool held only by the prefix cache."),
    "batch_limit": ("batch_limit", "Sequences that the batch controller lets run."),
    "prefill_limit": ("prefill_limit_tokens", "Prompt tokens that the batch controller lets into a step."),
}
_MODEL_LABELS = ("architecture", "weights_format", "numerics_profile", "backend", "kv_format", "instructions")  # of ModelInfo


class Metrics:
    """`running` and `waiting` are asked for at each collection."""

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        disable_created_metrics()  # decodefleet_start_time_seconds says it once
        self.registry = CollectorRegistry()
        self._last = Stats()

        self.duration = self._histogram("request_duration_seconds", "From arrival to the end, of requests that got a stream.", _DURATION)
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self.output_token = self._histogram("time_per_output_token_seconds", "Mean time between a request's tokens.", _OUTPUT_TOKEN)
        self.queue_time = self._histogram("queue_time_seconds", "From arrival until the engine took the request.", _FIRST_TOKEN)
        self.step_time = self._histogram("step_time_seconds", "Time of one engine step.", _STEP)
        self.batch_size = self._histogram("batch_size", "Sequences in one engine step.", _BATCH)

        self._gauge("running", "Sequences that the engine runs.").set_function(running)
        self._gauge("waiting", "Sequences in the queue.").set_function(waiting)
        self._engine_gauges = {field: self._gauge(name, text) for field, (name, text) in _ENGINE_GAUGES.items()}
        self._engine_counters = {field: self._counter(name, text) for field, (name, text) in _ENGINE_COUNTERS.items()}
        self.busy_ratio = self._gauge("busy_ratio", "Share of the last seconds that the engine spent in steps.")

        self.arrived = self._counter("arrived_requests", "Valid requests that came while serving, rejected ones included.")
        self.arrived_prompt_tokens = self._counter("arrived_prompt_tokens", "Prompt tokens of arrived requests.")
        self.arrived_max_tokens = self._counter("arrived_max_tokens", "Tokens that arrived requests may generate.")
        self.finished = self._counter("finished_requests", "Requests that ended as they should.")
        self.failed = self._counter("failed_requests", "Requests that ended with an internal failure or ran past their deadline.")
        self.cancelled = self._counter("cancelled_requests", "Requests that the client cancelled.")
        self.rejected = self._counter("rejected_requests", "Requests refused at the door.", ("reason",))
        self.finished_output_tokens = self._counter("finished_output_tokens", "Tokens of finished requests, as their usage says.")
        self.slo = self._counter("slo_requests", "Requests by objective; a changed threshold starts at zero.", ("objective", "result"))

        self.state = self._gauge("state", "1 for the agent's state.", ("state",))
        self.start_time = self._gauge("start_time_seconds", "Unix time at which the agent started; its counters began at zero then.")
        self.capacity = self._gauge("capacity_tokens_per_second", "Decode throughput that warm-up measured.", ("batch",))
        self.capacity_step = self._gauge("capacity_step_seconds", "Step time that warm-up measured.", ("batch",))
        self.mixed_step = self._gauge(
            "capacity_mixed_step_seconds",
            "Step time that warm-up measured of sequences that decode at a context, beside a chunk of a prompt that follows others.",
            ("batch", "context", "chunk", "start"),
        )
        self.build = self._gauge("build_info", "1 for what runs.", ("version", *_MODEL_LABELS))

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, namespace="decodefleet", registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, text, labels, namespace="decodefleet", registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, namespace="decodefleet", buckets=buckets, registry=self.registry)

    def observe_state(self, state: str) -> None:
        self.state.clear()
        self.state.labels(state).set(1)

    def observe_ready(self, ready: Ready) -> None:
        model = ready.model
        self.build.labels(version("decodefleet"), *(getattr(model, label) for label in _MODEL_LABELS)).set(1)
        # What was not measured has no sample, rather than a zero.
        for name, text, value in (
            ("load_seconds", "Time that loading the model took.", ready.load_seconds),
            ("warm_up_seconds", "Time that warm-up took.", ready.warm_up_seconds),
            ("capacity_prefill_tokens_per_second", "Prefill throughput that warm-up measured.", ready.prefill_tokens_per_second),
            ("capacity_context_tokens", "Tokens that each sequence attended to in that measurement.", ready.curve_context or None),
        ):
            if value is not None:
                self._gauge(name, text).set(value)
        for point in ready.curve:
            self.capacity.labels(str(point.batch)).set(point.tokens_per_second)
            self.capacity_step.labels(str(point.batch)).set(point.step_seconds)
        for mixed in ready.mixed:
            labels = (str(mixed.batch), str(mixed.context), str(mixed.chunk), str(mixed.start))
            self.mixed_step.labels(*labels).set(mixed.step_seconds)

    def observe_step(self, stats: Stats) -> None:
        """Takes the engine's numbers; its counters never fall, since the agent ends with the engine."""
        for field, gauge in self._engine_gauges.items():
            if (value := getattr(stats, field)) != getattr(self._last, field):
                gauge.set(value)
        for field, counter in self._engine_counters.items():
            if more := getattr(stats, field) - getattr(self._last, field):
                counter.inc(more)
        if stats.steps > self._last.steps and stats.batch:
            self.step_time.observe(stats.step_seconds)
            self.batch_size.observe(stats.batch)
        self._last = stats

    def observe_request(self, outcome: Outcome, measured: Measured, output_tokens: int) -> None:
        """A request that had been given to the engine has ended."""
        if outcome is Outcome.finished:
            self.finished.inc()
            self.finished_output_tokens.inc(output_tokens)
        elif outcome is Outcome.cancelled:
            self.cancelled.inc()
        else:
            self.failed.inc()
        self.duration.observe(measured.duration)
        for histogram, value in (
            (self.queue_time, measured.queue_time),
            (self.first_token, measured.time_to_first_token),
            (self.output_token, measured.time_per_output_token),
        ):
            if value is not None:
                histogram.observe(value)

    def count_objective(self, name: str, good: bool) -> None:
        self.slo.labels(name, "good" if good else "bad").inc()

    def reset_objective(self, name: str) -> None:
        """Starts the objective's counters at zero, and shows them."""
        self.drop_objective(name)
        for result in ("good", "bad"):
            self.slo.labels(name, result)

    def drop_objective(self, name: str) -> None:
        for result in ("good", "bad"):
            self.slo.remove(name, result)
