"""AgentControl: who may call it, that its numbers are those of /metrics, and what counts for an objective."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from decodefleet.v1 import control_pb2, control_pb2_grpc
from decodefleet.v1.control_pb2 import Objective


def objective(name: str, metric: Objective.Metric, threshold: float, target: float = 0.95) -> Objective:
    return Objective(name=name, metric=metric, threshold_seconds=threshold, target=target)


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", "secret-of-the-fleet"),)])
@pytest.mark.parametrize("method", ["GetLoad", "Configure", "Drain"])
def test_without_the_token_nothing_is_answered(echo, tools, metadata, method) -> None:
    stub = control_pb2_grpc.AgentControlStub(echo.control_channel)
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(getattr(control_pb2, f"{method}Request")(), metadata=metadata, timeout=tools.PATIENCE)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "Bearer" in caught.value.details()
    assert echo.load().state == control_pb2.AGENT_STATE_SERVING


def test_a_rotated_token_holds_at_once(start) -> None:
    agent = start()
    (agent.folder / "token").write_text("the-next-one")
    with pytest.raises(grpc.RpcError):
        agent.load()
    agent.token = "the-next-one"
    assert agent.load().instance_id


def test_without_a_token_control_is_not_served(start) -> None:
    agent = start(controlTokenFile=None)
    with pytest.raises(grpc.RpcError) as caught:
        agent.load()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "AgentControl is not served" in agent.stderr()


def test_load_equals_metrics(echo, tools) -> None:
    echo.configure(1, objective("ttft", Objective.TIME_TO_FIRST_TOKEN, 30.0), objective("up", Objective.AVAILABILITY, 0.0))
    tools.generate(echo, tools.ask("a b c", n=2, max_tokens=5))
    with pytest.raises(grpc.RpcError):
        list(echo.decoding.Generate(tools.ask("a", n=0)))
    tools.wait_for(lambda: echo.load().running == 0, "an idle engine")
    load, metrics = echo.load(), echo.metrics()

    def metric(name: str, **labels: str) -> float:
        return metrics[f"decodefleet_{name}", tuple(sorted(labels.items()))]

    for field, name in {
        "running": "running",
        "waiting": "waiting",
        "queued_prompt_tokens": "queued_prompt_tokens",
        "queued_output_tokens": "queued_output_tokens",
        "kv_bytes_used": "kv_used_bytes",
        "kv_bytes_total": "kv_total_bytes",
        "kv_bytes_cached": "kv_cached_bytes",
        "arrived_requests": "arrived_requests_total",
        "arrived_prompt_tokens": "arrived_prompt_tokens_total",
        "arrived_max_tokens": "arrived_max_tokens_total",
        "prompt_tokens": "prompt_tokens_total",
        "generated_tokens": "generated_tokens_total",
        "finished_requests": "finished_requests_total",
        "failed_requests": "failed_requests_total",
        "cancelled_requests": "cancelled_requests_total",
        "cached_prompt_tokens": "cached_prompt_tokens_total",
        "proposed_tokens": "proposed_tokens_total",
        "accepted_tokens": "accepted_tokens_total",
        "preemptions": "preemptions_total",
        "busy_seconds": "busy_seconds_total",
        "finished_output_tokens": "finished_output_tokens_total",
    }.items():
        assert getattr(load, field) == metric(name), field
    assert load.generated_tokens >= 10 and load.finished_output_tokens == 10 and load.finished_requests == 1
    assert dict(load.rejected_requests) == {"invalid": metric("rejected_requests_total", reason="invalid")}
    for counted in load.objectives:
        assert counted.good == metric("slo_requests_total", objective=counted.name, result="good")
        assert counted.total - counted.good == metric("slo_requests_total", objective=counted.name, result="bad")
    assert {counted.name for counted in load.objectives} == {"ttft", "up"} and all(counted.total == 1 for counted in load.objectives)


def test_every_metric_of_the_agent_is_exported(echo, tools) -> None:
    tools.generate(echo, tools.ask("a b c", max_tokens=5))
    names = {name for name, _ in echo.metrics()}
    for histogram in ("request_duration", "time_to_first_token", "time_per_output_token", "queue_time", "step_time"):
        assert f"decodefleet_{histogram}_seconds_bucket" in names
    assert {"decodefleet_batch_size_bucket", "decodefleet_busy_ratio", "decodefleet_load_seconds", "decodefleet_build_info"} <= names


def test_configure_epochs(start, tools) -> None:
    agent = start()

    def counts() -> dict[str, tuple[int, int, int, float]]:
        tools.wait_for(lambda: agent.load().running == 0, "an idle engine")
        return {o.name: (o.good, o.total, o.epoch, o.threshold_seconds) for o in agent.load().objectives}

    up = objective("up", Objective.AVAILABILITY, 0.0)
    agent.configure(3, objective("ttft", Objective.TIME_TO_FIRST_TOKEN, 60.0), up)
    tools.generate(agent, tools.ask("a b", max_tokens=2))
    assert counts() == {"ttft": (1, 1, 3, 60.0), "up": (1, 1, 3, 0.0)}

    assert agent.configure(2, objective("ttft", Objective.TIME_TO_FIRST_TOKEN, 1.0)).generation == 3  # older: ignored
    assert counts() == {"ttft": (1, 1, 3, 60.0), "up": (1, 1, 3, 0.0)}

    agent.configure(4, objective("ttft", Objective.TIME_TO_FIRST_TOKEN, 60.0, target=0.5), up)  # another target goes on
    assert counts() == {"ttft": (1, 1, 3, 60.0), "up": (1, 1, 3, 0.0)}

    agent.configure(5, objective("ttft", Objective.TIME_TO_FIRST_TOKEN, 1e-9), up)  # another threshold starts at zero
    assert counts() == {"ttft": (0, 0, 5, 1e-9), "up": (1, 1, 3, 0.0)}
    tools.generate(agent, tools.ask("a b", max_tokens=2))
    assert counts() == {"ttft": (0, 1, 5, 1e-9), "up": (2, 2, 3, 0.0)}

    agent.configure(6, up)
    assert set(counts()) == {"up"}
    assert not [labels for name, labels in agent.metrics() if name == "decodefleet_slo_requests_total" and ("objective", "ttft") in labels]
    agent.configure(7, objective("ttft", Objective.TIME_TO_FIRST_TOKEN, 1e-9), up)
    assert counts() == {"ttft": (0, 0, 7, 1e-9), "up": (2, 2, 3, 0.0)}
    assert agent.load().generation == 7


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (objective("", Objective.AVAILABILITY, 0), "name"),
        (objective("x", Objective.METRIC_UNSPECIFIED, 1.0), "metric"),
        (objective("x", Objective.QUEUE_TIME, 0.0), "threshold_seconds"),
        (objective("x", Objective.QUEUE_TIME, 1.0, target=1.0), "target"),
    ],
)
def test_configure_refuses(echo, bad: Objective, words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        echo.configure(100, bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and words in caught.value.details()
    assert echo.load().generation < 100


def test_limits_reach_a_running_agent(start, tools) -> None:
    agent = start(script={"step": 0.1}, engine={"batching": {"maxBatch": 1, "maxWaiting": 8}})
    agent.configure(1, max_waiting=1)
    calls = [agent.decoding.Generate(tools.ask("a b", max_tokens=200)) for _ in range(2)]
    tools.wait_for(lambda: agent.load().running + agent.load().waiting == 2, "both")
    with pytest.raises(grpc.RpcError) as caught:
        list(agent.decoding.Generate(tools.ask("a b")))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "at most 1" in caught.value.details()
    for call in calls:
        call.cancel()


def test_objectives_agree_with_the_request_log(start, tools) -> None:
    agent = start(script={"step": 0.05}, engine={"batching": {"maxBatch": 1, "maxWaiting": 2}})
    agent.configure(
        1,
        objective("ttft", Objective.TIME_TO_FIRST_TOKEN, 0.4),
        objective("tpot", Objective.TIME_PER_OUTPUT_TOKEN, 10.0),
        objective("queue", Objective.QUEUE_TIME, 0.4),
        objective("duration", Objective.REQUEST_DURATION, 30.0),
        objective("up", Objective.AVAILABILITY, 0.0),
    )
    # One runs, two wait behind it, a fourth is refused.
    calls = []
    for n in range(3):
        calls.append(agent.decoding.Generate(tools.ask("a b c d", request_id=f"served {n}", max_tokens=12), timeout=tools.PATIENCE))
        tools.wait_for(lambda: agent.load().running + agent.load().waiting == n + 1, "its arrival")  # noqa: B023
    with pytest.raises(grpc.RpcError):
        list(agent.decoding.Generate(tools.ask("a", request_id="refused")))
    for call in calls:
        list(call)
    tools.generate(agent, tools.ask("a", request_id="single", max_tokens=1))
    with pytest.raises(grpc.RpcError):
        list(agent.decoding.Generate(tools.ask("a b", request_id="late", max_tokens=400), timeout=0.6))
    left = agent.decoding.Generate(tools.ask("a b", request_id="left", max_tokens=400))
    next(iter(left))
    left.cancel()
    with pytest.raises(grpc.RpcError):
        list(agent.decoding.Generate(tools.ask("a", request_id="invalid", n=0)))
    log = tools.wait_for(lambda: (lines := agent.request_log()) and "left" in lines and "late" in lines and lines, "all lines")

    assert {name: line["outcome"] for name, line in log.items()} == {
        **{f"served {n}": "finished" for n in range(3)},
        "refused": "rejected",
        "single": "finished",
        "late": "deadline",
        "left": "cancelled",
    }
    counted = {o.name: (o.good, o.total) for o in agent.load().objectives}
    for name in counted:
        verdicts = [line["good"][name] for line in log.values() if name in line["good"]]
        assert counted[name] == (sum(verdicts), len(verdicts)), name
    assert set(log["refused"]["good"].values()) == {False} and len(log["refused"]["good"]) == 5
    assert set(log["late"]["good"].values()) == {False} and len(log["late"]["good"]) == 5
    assert "tpot" not in log["single"]["good"] and log["single"]["good"]["up"] is True
    assert "up" not in log["left"]["good"] and "duration" not in log["left"]["good"] and "ttft" in log["left"]["good"]
    assert log["served 2"]["good"]["queue"] is (log["served 2"]["queue_time"] <= 0.4) and log["served 2"]["queue_time"] > 0.4
    observed = {o.name: o.observed_seconds if o.HasField("observed_seconds") else None for o in agent.load().objectives}
    assert observed["up"] is None
    assert observed["ttft"] is not None and observed["ttft"] > log["served 0"]["ttft"]


def test_health_and_reflection_on_both_ports(echo, tools) -> None:
    for channel, service in ((echo.serving_channel, "decodefleet.v1.Decoding"), (echo.control_channel, "decodefleet.v1.AgentControl")):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", service):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=tools.PATIENCE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
        ]
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=tools.PATIENCE)
        assert {service, "grpc.health.v1.Health"} <= {s.name for s in listed.list_services_response.service}
        assert described.file_descriptor_response.file_descriptor_proto


def test_http(echo) -> None:
    assert echo.http("/livez") == (200, "alive\n")
    assert echo.http("/readyz")[0] == echo.http("/startupz")[0] == 200
    assert echo.http("/nothing")[0] == 404
