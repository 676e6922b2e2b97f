"""`python -m decodefleet_agent.bench.child MODULE`: hosts one engine; a line of JSON asks, a line of JSON answers."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from decodefleet_agent.bench.protocol import Load, Peer


def main(module: str) -> None:
    """Serves until standard input ends. What the engine itself prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None:
                peer = importlib.import_module(module).create()
            answer = {"result": METHODS[request["method"]](peer, **request["arguments"])}
        # The error is the benchmark's to tell, with the engine's name; this process has nobody to tell it to.
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answers, answer)


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _load(peer: Peer, **arguments: Any) -> dict[str, Any]:
    return asdict(peer.load(Load(**arguments)))


def _generate(peer: Peer, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Timing, and `peak`: the largest resident set while generating, bytes; what loading took at its worst is not in it."""
    Path("/proc/self/clear_refs").write_text("5")
    timing = peer.generate(prompts, new_tokens)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return {**asdict(timing), "peak": peak * 1024}


def _logprobs(peer: Peer, windows: list[list[int]]) -> list[list[float]] | None:
    return peer.logprobs(windows)


def _floor(peer: Peer, rows: int) -> float | None:
    return peer.floor(rows)


METHODS: dict[str, Callable[..., Any]] = {"load": _load, "generate": _generate, "logprobs": _logprobs, "floor": _floor}

if __name__ == "__main__":
    main(sys.argv[1])
