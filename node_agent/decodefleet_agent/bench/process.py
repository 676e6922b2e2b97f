"""An engine's child process, seen from the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decodefleet_agent.bench.catalog import Installed
from decodefleet_agent.bench.protocol import Load, Loaded, Timing

_SOURCES = Path(__file__).parents[2]


class EngineError(Exception):
    """The engine cannot do what it was asked for; the message is its own."""


class EngineProcess:
    """Starts the engine and loads the model. Raises EngineError. Closing it ends the process."""

    def __init__(self, installed: Installed, load: Load) -> None:
        self.name = installed.peer.name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        paths = [str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [installed.python, "-m", "decodefleet_agent.bench.child", installed.peer.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment(load.threads), "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            self.loaded = Loaded(**self._ask("load", **asdict(load)))
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[Timing, int]:
        """Timing, and the largest resident set meanwhile in bytes."""
        answer = self._ask("generate", prompts=prompts, new_tokens=new_tokens)
        return Timing(answer["first"], answer["total"], answer["rest"]), answer["peak"]

    def logprobs(self, windows: list[list[int]]) -> list[list[float]] | None:
        return self._ask("logprobs", windows=windows)

    def floor(self, rows: int) -> float | None:
        return self._ask("floor", rows=rows)

    def close(self) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"its process ended with {self._process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["result"]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def environment(threads: int) -> dict[str, str]:
    """Variables that tell every engine's libraries how many threads to use, and keep them off the network."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
