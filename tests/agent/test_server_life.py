"""The agent's life: loading, drain, SIGTERM, the engine's death, and what it says when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decodefleet.v1 import control_pb2, decoding_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(channel: grpc.Channel, service: str = "") -> int:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status


def code_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def test_while_it_loads(start, tools) -> None:
    agent = start(ready=False, script={"loading": 600})
    tools.wait_for(lambda: "reading the script" in agent.http("/startupz")[1], "progress")
    assert agent.http("/startupz")[0] == agent.http("/readyz")[0] == 503
    assert agent.http("/livez")[0] == 200
    assert health(agent.serving_channel) == health(agent.control_channel) == NOT_SERVING
    assert health(agent.control_channel, "decodefleet.v1.AgentControl") == SERVING
    code, details = code_of(agent.decoding.Generate(tools.ask("hi")))
    assert code is grpc.StatusCode.UNAVAILABLE and "reading the script (50%)" in details
    load = agent.load()
    assert load.state == control_pb2.AGENT_STATE_LOADING and not load.HasField("warm_up")
    assert agent.end() == (0, agent.stderr())


def test_drain_lets_streams_end_and_takes_no_more(start, tools) -> None:
    agent = start(script={"step": 0.1}, engine={"batching": {"maxBatch": 1}})
    before = agent.load()
    calls = [agent.decoding.Generate(tools.ask("a b c", max_tokens=60))]
    messages = [next(calls[0])]
    calls.append(agent.decoding.Generate(tools.ask("a b c", max_tokens=5)))  # waits behind the first
    tools.wait_for(lambda: agent.load().waiting == 1, "the second")
    watch = health_pb2_grpc.HealthStub(agent.serving_channel).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING

    answer = agent.drain()
    assert (answer.running, answer.waiting) == (1, 1)
    assert next(watch).status == NOT_SERVING
    assert health(agent.control_channel) == NOT_SERVING
    assert agent.http("/readyz")[0] == 503 and agent.http("/livez")[0] == 200
    assert agent.load().state == control_pb2.AGENT_STATE_DRAINING
    assert code_of(agent.decoding.Generate(tools.ask("hi")))[0] is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(agent.address("serving")) as fresh:
        assert code_of(decoding_pb2_grpc.DecodingStub(fresh).Generate(tools.ask("hi")))[0] is grpc.StatusCode.UNAVAILABLE
    assert (agent.drain().running, agent.process.poll()) == (1, None)  # again: no difference

    for call in calls:
        messages += list(call)
    assert sum(len(delta.token_ids) for message in messages for delta in message.deltas) == 65
    tools.wait_for(lambda: agent.load().running + agent.load().waiting == 0, "an empty agent")
    load = agent.load()
    assert load.instance_id == before.instance_id and load.finished_requests == 2 and load.failed_requests == 0
    assert agent.end()[0] == 0


def test_sigterm_drains_and_exits_0(start, tools) -> None:
    agent = start(script={"step": 0.1})
    call = agent.decoding.Generate(tools.ask("a b c", max_tokens=20))
    messages = [next(call)]
    agent.process.send_signal(signal.SIGTERM)
    tools.wait_for(lambda: agent.load().state == control_pb2.AGENT_STATE_DRAINING, "the drain")
    messages += list(call)
    assert messages[-1].usage.completion_tokens == 20
    code, stderr = agent.end()
    assert code == 0 and "Traceback" not in stderr
    assert agent.request_log()[messages[0].start.request_id]["outcome"] == "finished"


def test_the_drain_timeout_cuts_streams_with_unavailable(start, tools) -> None:
    agent = start(script={"step": 0.05}, drainTimeout="500ms")
    call = agent.decoding.Generate(tools.ask("a b c", max_tokens=500, request_id="cut"))
    next(call)
    agent.process.send_signal(signal.SIGTERM)
    code, details = code_of(call)
    assert code is grpc.StatusCode.UNAVAILABLE and "drain timeout" in details
    assert agent.end()[0] == 0
    assert agent.request_log()["cut"]["outcome"] == "failed"


def test_a_second_signal_does_not_wait(start, tools) -> None:
    agent = start(script={"step": 0.05}, drainTimeout="600s")
    call = agent.decoding.Generate(tools.ask("a b c", max_tokens=500))
    next(call)
    agent.process.send_signal(signal.SIGINT)
    tools.wait_for(lambda: agent.load().state == control_pb2.AGENT_STATE_DRAINING, "the drain")
    agent.process.send_signal(signal.SIGINT)
    assert code_of(call)[0] is grpc.StatusCode.UNAVAILABLE
    assert agent.end()[0] == 0


def test_a_stream_outlives_its_connection(start, tools) -> None:
    """The server ends connections after 30 seconds, so that clients that balance find new replicas."""
    agent = start(script={"step": 0.25})
    states: list[grpc.ChannelConnectivity] = []
    agent.serving_channel.subscribe(states.append)
    call = agent.decoding.Generate(tools.ask("a b c", max_tokens=400))
    messages = [next(call)]
    for message in call:
        messages.append(message)
        if states and states[-1] is grpc.ChannelConnectivity.IDLE:
            break
    assert grpc.ChannelConnectivity.READY in states and states[-1] is grpc.ChannelConnectivity.IDLE
    assert next(call).deltas  # the stream goes on
    call.cancel()


def test_requests_that_arrive_during_a_drain_are_served_or_told_to_go(start, tools) -> None:
    """Whatever the moment: the whole answer, or UNAVAILABLE before the first message."""
    agent = start(script={"step": 0.01}, engine={"batching": {"maxBatch": 64}})
    wrong: list[str] = []
    served = refused = 0
    go_on = threading.Event()
    go_on.set()

    def run() -> None:
        nonlocal served, refused
        with grpc.insecure_channel(agent.address("serving"), options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            stub = decoding_pb2_grpc.DecodingStub(channel)
            while go_on.is_set():
                messages = []
                try:
                    for message in stub.Generate(tools.ask("a b c", max_tokens=5)):
                        messages.append(message)
                    served += 1
                    if not messages[-1].HasField("usage"):
                        wrong.append("an answer without its end")
                except grpc.RpcError as error:
                    refused += 1
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or messages:
                        wrong.append(f"{error.code()} after {len(messages)} messages: {error.details()}")

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    tools.wait_for(lambda: served > 40, "traffic")
    agent.drain()
    tools.wait_for(lambda: refused > 40, "refusals")
    go_on.clear()
    for thread in threads:
        thread.join(tools.PATIENCE)
    assert wrong == []
    assert agent.load().failed_requests == agent.load().cancelled_requests == 0


def test_when_the_engine_is_killed_streams_end_and_the_agent_exits(start, tools) -> None:
    agent = start(script={"step": 0.05})
    call = agent.decoding.Generate(tools.ask("a b c", max_tokens=500, request_id="orphan"))
    next(call)
    (engine,) = agent.children()
    os.kill(engine, signal.SIGKILL)
    code, details = code_of(call)
    assert code is grpc.StatusCode.UNAVAILABLE and "signal 9" in details
    assert agent.process.wait(tools.PATIENCE) == 1
    assert "the engine's process ended with signal 9" in agent.stderr()
    assert agent.request_log()["orphan"]["outcome"] == "failed"


def test_when_the_server_is_killed_the_engine_ends(start, tools) -> None:
    agent = start()
    (engine,) = agent.children()
    agent.process.kill()
    tools.wait_for(lambda: not os.path.exists(f"/proc/{engine}"), "the engine's end")


def test_an_engine_that_cannot_start_is_quoted(start, tools, tmp_path) -> None:
    process = tools.launch(tmp_path, tools.SCRIPTED, {"fail": "the pool needs 9 GiB; raise kvCache.memory"})
    assert process.wait(tools.PATIENCE) == 1
    assert "decodefleet-agent: the pool needs 9 GiB; raise kvCache.memory" in (tmp_path / "stderr").read_text()


def test_a_model_that_is_not_there_is_named(tools, tmp_path) -> None:
    process = tools.launch(tmp_path, tools.SCRIPTED, modelUri="file:///nowhere/model.gguf")
    assert process.wait(tools.PATIENCE) == 1
    stderr = (tmp_path / "stderr").read_text()
    assert "/nowhere/model.gguf" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("port", ["servingPort", "controlPort", "httpPort"])
def test_a_taken_port_is_named(tools, tmp_path, port: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        process = tools.launch(tmp_path, tools.SCRIPTED, **{port: number})
        assert process.wait(tools.PATIENCE) == 2
    stderr = (tmp_path / "stderr").read_text()
    assert f"{port}: 127.0.0.1:{number} cannot be bound" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"controlTokenFile": "/nowhere/token"}, "controlTokenFile: /nowhere/token cannot be read"),
        ({"requestLog": "/nowhere/log"}, "requestLog: /nowhere/log cannot be written"),
        ({"portsFile": "/nowhere/ports"}, "portsFile: /nowhere/ports cannot be written"),
        ({"tls": {"certFile": "/nowhere/cert", "keyFile": "/nowhere/key"}}, "/nowhere/cert cannot be read"),
        ({"engine": {"batching": {"maxBatch": 0}}}, "engine.batching.maxBatch"),
        ({"colour": "blue"}, "colour"),
        ({"drainTimeout": "soon"}, "drainTimeout"),
    ],
)
def test_a_bad_configuration_is_exit_code_2(tools, tmp_path, config, words: str) -> None:
    process = tools.launch(tmp_path, tools.SCRIPTED, **config)
    assert process.wait(tools.PATIENCE) == 2
    stderr = (tmp_path / "stderr").read_text()
    assert words in stderr and "Traceback" not in stderr


@pytest.mark.parametrize(("text", "words"), [("{", "config.json"), ("{}", "modelUri"), ("", "config.json")])
def test_a_broken_file_is_exit_code_2(tmp_path, capfd, text: str, words: str) -> None:
    from decodefleet_agent.main import main

    (tmp_path / "config.json").write_text(text)
    assert main(["--config", str(tmp_path / "config.json")]) == 2
    assert words in capfd.readouterr().err
    assert main(["--config", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capfd.readouterr().err


def test_ports_file(start) -> None:
    agent = start()
    assert set(json.loads((agent.folder / "ports.json").read_text())) == {"serving", "control", "http"}
