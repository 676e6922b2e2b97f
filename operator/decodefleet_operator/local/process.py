"""One agent as a process of this machine: started, watched, restarted with back-off, and stopped, as a kubelet does with a container."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from decodefleet.config import AgentConfig
from decodefleet_operator.local import home

log = logging.getLogger(__name__)

LONGEST_BACKOFF = 30.0
HEALTHY_AFTER = 10.0  # seconds as ready after which an end is no start-up failure
POLL = 0.05
_TAIL = 16384  # bytes of the log that are searched for the last words
_LOG_PREFIX = re.compile(r"^(decodefleet-agent|\S*(Error|Exception)|error|fatal|critical):\s+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ports:
    """Those that the agent bound."""

    serving: int
    control: int
    http: int


class AgentProcess:
    """An agent and its restarts.

    `changed` is called after each change of what the attributes tell; `restarting`, with its last words, when an agent ended by itself.
    """

    def __init__(
        self,
        folder: Path,
        config: AgentConfig,
        environment: Mapping[str, str],
        changed: Callable[[], None],
        restarting: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._changed = changed
        self._restarting = restarting
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._deadline = float("inf")  # by time.monotonic(): when a stopping agent is killed
        self._config = config.model_copy(update={"ports_file": str(folder / "ports.json")})
        self.draining = False  # an agent that ends while it drains is not started again
        self.ports: Ports | None = None
        self.started_at: float | None = None
        self.ready_at: float | None = None  # of the process that runs now
        self.retry_at: float | None = None
        self.restarts = 0
        self.problem: str | None = None  # the last words of an agent that ended by itself, until the next one is ready
        self.silent_since: float | None = None  # it was ready and does not answer any more
        self.exit_code: int | None = None  # set once it has ended for good

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def log(self) -> Path:
        return self._folder / "agent.log"

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def ready(self, is_ready: bool) -> None:
        """Records what the agent says of itself."""
        before = (self.ready_at, self.silent_since, self.problem)
        self.silent_since = None
        if is_ready:
            self.problem = None
        if is_ready != (self.ready_at is not None):
            self.ready_at = time.time() if is_ready else None
        if before != (self.ready_at, self.silent_since, self.problem):
            self._changed()

    def silent(self, since: float) -> None:
        """Records that it has not answered since then. One that never was ready is just starting."""
        if self.ready_at is not None:
            self.ready_at, self.silent_since = None, since
            self._changed()

    def stop(self, grace: float) -> None:
        """Ends the agent: SIGTERM now, SIGKILL after `grace` seconds. A later call may only shorten the time."""
        self._deadline = min(self._deadline, time.monotonic() + grace)
        if not self._stopping.is_set():
            self._stopping.set()
            self._signal(signal.SIGTERM)

    async def run(self) -> None:
        """Keeps the agent running until `stop`; returns when its process is gone. Cancelling kills it."""
        failures = 0
        try:
            while not self._stopping.is_set():
                code, offset = await self._run_once()
                healthy = self.ready_at is not None and time.time() - self.ready_at >= HEALTHY_AFTER
                self.ready_at, self.ports, self.silent_since = None, None, None
                if self._stopping.is_set() or self.draining:
                    self.exit_code = code
                    break
                self.problem = last_words(self.log, offset, code)
                failures = 0 if healthy else failures + 1
                delay = 0.0 if healthy else min(2.0 ** (failures - 1), LONGEST_BACKOFF)
                self.restarts += 1
                self.retry_at = time.time() + delay
                log.warning("agent ended", extra={"pod": self._folder.name, "code": code, "retry_in": delay, "problem": self.problem})
                self._restarting(self.problem)
                self._changed()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
                self.retry_at = None
            if self.exit_code is None:
                self.exit_code = 0
        finally:
            self._kill_group()
            self._changed()

    async def _run_once(self) -> tuple[int, int]:
        """One life of the process: its exit code, and where in the log its words begin."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ports_file = Path(self._config.ports_file or "")
        ports_file.unlink(missing_ok=True)
        config_file = self._folder / "config.json"
        home.write_text(config_file, self._config.model_dump_json(by_alias=True, indent=1))
        agent = [sys.executable, "-m", "decodefleet_agent", "--config", str(config_file)]
        tied = [sys.executable, "-m", "decodefleet_operator.local.tied", "SIGKILL", str(os.getpid())]
        with self.log.open("ab") as output:
            offset = output.tell()
            # A session of its own, so that a Ctrl-C in the terminal is for the supervisor alone and the group can be killed whole.
            self._process = await asyncio.create_subprocess_exec(
                *tied, *agent, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment, start_new_session=True
            )
        self.started_at = time.time()
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        self._changed()
        waiting = asyncio.create_task(self._process.wait())
        try:
            while not waiting.done():
                if self.ports is None and (ports := _read_ports(ports_file)) is not None:
                    self.ports = ports
                    self._changed()
                if time.monotonic() >= self._deadline:
                    self._kill_group()
                await asyncio.wait([waiting], timeout=POLL if self.ports is None or self._stopping.is_set() else 1.0)
            return waiting.result(), offset
        finally:
            waiting.cancel()
            self._kill_group()  # an engine must not outlive its server

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def last_words(log_file: Path, offset: int, code: int) -> str:
    """Why an agent ended: the last line that it logged since `offset`, and how the process ended where that says more."""
    with log_file.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(offset, end - _TAIL))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    said = next((text for line in reversed(lines) if (text := _message(line))), "")
    if code < 0:
        return how
    return said[:1000] if said else f"ended without a word, {how}"


def _message(line: str) -> str:
    """The message of a log line, structured or not."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            return str(fields.get("message") or fields.get("event") or fields.get("msg") or line)
    return _LOG_PREFIX.sub("", line)


def _read_ports(path: Path) -> Ports | None:
    try:
        found = json.loads(path.read_text())
        return Ports(int(found["serving"]), int(found["control"]), int(found["http"]))
    except (FileNotFoundError, ValueError, KeyError):
        return None  # not there yet, or half written
