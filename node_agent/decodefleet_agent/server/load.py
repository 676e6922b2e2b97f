"""GetLoad: the numbers of /metrics, read out of the same registry."""

from __future__ import annotations

from decodefleet.v1 import control_pb2 as pb
from decodefleet_agent.server.agent import Agent

# GetLoadResponse's field -> the metric's sample.
FIELDS = {
    "running": "decodefleet_running",
    "waiting": "decodefleet_waiting",
    "queued_prompt_tokens": "decodefleet_queued_prompt_tokens",
    "queued_output_tokens": "decodefleet_queued_output_tokens",
    "kv_bytes_used": "decodefleet_kv_used_bytes",
    "kv_bytes_total": "decodefleet_kv_total_bytes",
    "kv_bytes_cached": "decodefleet_kv_cached_bytes",
    "arrived_requests": "decodefleet_arrived_requests_total",
    "arrived_prompt_tokens": "decodefleet_arrived_prompt_tokens_total",
    "arrived_max_tokens": "decodefleet_arrived_max_tokens_total",
    "prompt_tokens": "decodefleet_prompt_tokens_total",
    "generated_tokens": "decodefleet_generated_tokens_total",
    "finished_requests": "decodefleet_finished_requests_total",
    "failed_requests": "decodefleet_failed_requests_total",
    "cancelled_requests": "decodefleet_cancelled_requests_total",
    "cached_prompt_tokens": "decodefleet_cached_prompt_tokens_total",
    "proposed_tokens": "decodefleet_proposed_tokens_total",
    "accepted_tokens": "decodefleet_accepted_tokens_total",
    "preemptions": "decodefleet_preemptions_total",
    "busy_seconds": "decodefleet_busy_seconds_total",
    "finished_output_tokens": "decodefleet_finished_output_tokens_total",
}


def read_load(agent: Agent) -> pb.GetLoadResponse:
    """The agent's numbers now."""
    values: dict[str, float] = {}
    rejected: dict[str, int] = {}
    slo: dict[tuple[str, str], int] = {}
    for family in agent.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "decodefleet_rejected_requests_total":
                rejected[sample.labels["reason"]] = int(sample.value)
            elif sample.name == "decodefleet_slo_requests_total":
                slo[sample.labels["objective"], sample.labels["result"]] = int(sample.value)
            elif not sample.labels:
                values[sample.name] = sample.value

    def counts(name: str) -> tuple[int, int]:
        good, bad = slo[name, "good"], slo[name, "bad"]
        return good, good + bad

    load = pb.GetLoadResponse(
        instance_id=agent.instance_id,
        start_time=agent.start_time,
        state=pb.AgentState.Value(f"AGENT_STATE_{agent.phase}"),
        generation=agent.objectives.generation,
        rejected_requests=rejected,
        objectives=agent.objectives.describe(counts),
        warm_up=_warm_up(agent),
    )
    for field, sample_name in FIELDS.items():
        value = values[sample_name]
        setattr(load, field, value if field == "busy_seconds" else int(value))
    return load


def _warm_up(agent: Agent) -> pb.WarmUp | None:
    ready = agent.ready
    if ready is None:
        return None
    return pb.WarmUp(
        load_seconds=ready.load_seconds,
        warm_up_seconds=ready.warm_up_seconds or 0.0,
        prefill_tokens_per_second=ready.prefill_tokens_per_second or 0.0,
        curve=[
            pb.WarmUp.CurvePoint(batch=point.batch, step_seconds=point.step_seconds, tokens_per_second=point.tokens_per_second)
            for point in ready.curve
        ],
        curve_context_tokens=ready.curve_context,
    )
