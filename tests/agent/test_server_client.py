"""`decodefleet generate`, the clients, and where they find a fleet."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import grpc
import pytest

from decodefleet import endpoints
from decodefleet.client import AsyncClient, build_request


def generate(*arguments: str, home: str = "/nowhere", stdin: str = "") -> subprocess.CompletedProcess[str]:
    code = "import sys; from decodefleet_operator.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", *arguments]
    environment = {**os.environ, "DECODEFLEET_HOME": home}
    return subprocess.run(command, capture_output=True, text=True, env=environment, input=stdin, timeout=120, check=False)


def test_generate_prints_the_text(echo) -> None:
    done = generate("--endpoint", echo.address("serving"), "--raw", "--max-tokens", "4", "--stats", "--seed", "9", "a b c d")
    assert (done.returncode, done.stdout) == (0, "a b c d\n")
    assert "prompt 4 tokens" in done.stderr and "answer 4" in done.stderr and "seed 9" in done.stderr and "retries 0" in done.stderr


def test_generate_reads_standard_input_and_stops(echo) -> None:
    done = generate("--endpoint", echo.address("serving"), "--raw", "--stop", " c", "-", stdin="a b c d")
    assert (done.returncode, done.stdout) == (0, "a b\n")


def test_generate_finds_the_local_fleet(echo, tmp_path) -> None:
    fleet = tmp_path / "tiny"
    fleet.mkdir()
    (fleet / "fleet.json").write_text(json.dumps({"name": "tiny", "endpoint": echo.address("serving"), "pid": os.getpid()}))
    done = generate("--raw", "--max-tokens", "2", "a b", home=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "a b\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["hi"], 1, "no fleet runs on this machine; start one with `decodefleet up -f"),
        (["--fleet", "other", "hi"], 1, "no fleet named 'other'"),
        (["--endpoint", "127.0.0.1:1", "hi"], 1, "nothing answers at 127.0.0.1:1"),
        (["--endpoint", "ECHO", "--temperature", "-1", "hi"], 1, "sampling.temperature: is -1"),
        (["--endpoint", "ECHO", "--max-tokens", "-1", "hi"], 2, "the request cannot be built"),
        (["--endpoint", "ECHO", "--timeout", "0.000001", "hi"], 1, "the time given by --timeout passed"),
        (["--endpoint", "CONTROL", "hi"], 1, "not a decodefleet endpoint"),
        (["--raw", "--system", "x", "--endpoint", "ECHO", "hi"], 2, "--system needs the chat template"),
    ],
)
def test_generate_says_what_is_wrong(echo, arguments: list[str], code: int, words: str) -> None:
    places = {"ECHO": echo.address("serving"), "CONTROL": echo.address("control")}
    done = generate(*(places.get(argument, argument) for argument in arguments))
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_endpoints(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DECODEFLEET_HOME", str(tmp_path))

    def write(name: str, text: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "fleet.json").write_text(text)

    write("broken", "{")
    write("dead", json.dumps({"name": "dead", "endpoint": "x:1", "pid": 2**22 + 1}))
    with pytest.raises(endpoints.NoEndpoint, match="no fleet runs"):
        endpoints.local_endpoint()
    write("one", json.dumps({"name": "one", "endpoint": None, "pid": os.getpid()}))
    with pytest.raises(endpoints.NoEndpoint, match="still starting"):
        endpoints.local_endpoint()
    write("one", json.dumps({"name": "one", "endpoint": "h:1", "pid": os.getpid()}))
    assert endpoints.local_endpoint() == "h:1"
    write("two", json.dumps({"name": "two", "endpoint": "h:2", "pid": os.getpid()}))
    with pytest.raises(endpoints.NoEndpoint, match="one, two"):
        endpoints.local_endpoint()
    assert endpoints.local_endpoint("two") == "h:2"


def test_state_directory(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("DECODEFLEET_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert endpoints.state_directory() == tmp_path / "decodefleet"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert endpoints.state_directory() == tmp_path / ".local" / "state" / "decodefleet"


def test_build_request() -> None:
    assert list(build_request([1, 2]).token_ids.ids) == [1, 2]
    assert build_request([("user", "hi")]).chat.messages[0].content == "hi"
    assert not build_request("hi", seed=None).sampling.HasField("seed") and build_request("hi", seed=0).sampling.HasField("seed")
    with pytest.raises(ValueError, match=r"heat.*temperature"):
        build_request("hi", heat=1)


async def test_async_client(echo) -> None:
    async with AsyncClient(f"ipv4:///{echo.address('serving')}") as client:
        results = await asyncio.gather(*(client.complete("a b c", max_tokens=3, n=2) for _ in range(4)))
        assert [result.texts for result in results] == [["a b c", "a b c"]] * 4
        assert all(result.retries == 0 and result.usage.completion_tokens == 6 for result in results)
        assert [piece async for piece in client.generate("a b", max_tokens=2)] == ["a", " b"]
        assert (await client.model()).architecture == "echo"
        with pytest.raises(grpc.RpcError):
            await client.complete("a", n=0)


def test_importing_the_commands_loads_no_grpc() -> None:
    code = "import sys, decodefleet.commands; print('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
