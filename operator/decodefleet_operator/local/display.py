"""How a fleet comes up, for the eye: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from decodefleet_operator.local.watch import Agent, Snapshot, age

TRY = 'decodefleet generate "Write a haiku about rivers"'

_MARKS = {
    "Serving": ("●", "green"),
    "Draining": ("◐", "yellow"),
    "Stopping": ("◐", "yellow"),
    "Restarting": ("✗", "red"),
    "Ended": ("○", "dim"),
}


class Display(Protocol):
    """What `up` tells while it waits."""

    def show(self, snapshot: Snapshot, stopping: bool = False) -> None: ...

    def ready(self, snapshot: Snapshot, seconds: float) -> None: ...

    def note(self, text: str) -> None: ...

    def failed(self, message: str, detail: str = "", what: str = "could not start") -> None: ...

    def stopped(self) -> None: ...


@contextlib.contextmanager
def display(name: str, model: str | None, detached: bool) -> Iterator[Display]:
    """The one that fits standard output. `model` is what a new fleet starts with."""
    console = Console(highlight=False)
    if not console.is_terminal:
        yield Lines(name, model, detached)
        return
    with _quiet_keys(), Live(console=console, refresh_per_second=10, transient=True) as live:
        yield Picture(name, model, detached, live, console)


@contextlib.contextmanager
def _quiet_keys() -> Iterator[None]:
    """Typed keys, the ^C of Ctrl-C among them, do not show up inside the picture."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor) or os.tcgetpgrp(descriptor) != os.getpgrp():  # the kernel stops a job in the background that asks for this
        yield
        return
    before = termios.tcgetattr(descriptor)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Lines:
    """One line per change, for logs and pipes."""

    def __init__(self, name: str, model: str | None, detached: bool) -> None:
        self._name, self._detached = name, detached
        self._phases: dict[str, str] = {}
        self._stopping = False
        if model:
            self.note(f"{name}: starting {model}")

    def show(self, snapshot: Snapshot, stopping: bool = False) -> None:
        if stopping and not self._stopping:
            self._stopping = True
            self.note(f"{self._name}: stopping" + _streams(snapshot))
        phases = {agent.name: agent.phase for agent in snapshot.agents}
        for agent in snapshot.agents:
            if self._phases.get(agent.name) != agent.phase:
                self.note(f"{agent.name}: {agent.phrase}" + (f": {agent.problem}" if agent.phase == "Restarting" else ""))
        self._phases = phases

    def ready(self, snapshot: Snapshot, seconds: float) -> None:
        self.show(snapshot)
        self.note(f"{self._name} is ready after {seconds:.1f}s")
        for label, text in _pointers(self._name, snapshot, self._detached):
            self.note(f"  {label:<9} {text}")

    def note(self, text: str) -> None:
        print(text, flush=True)

    def failed(self, message: str, detail: str = "", what: str = "could not start") -> None:
        print(f"decodefleet up: {self._name} {what}: {message}" + (f"\n{detail}" if detail else ""), file=sys.stderr, flush=True)

    def stopped(self) -> None:
        self.note(f"{self._name} is stopped; nothing is left of it")


class Picture:
    """A table of agents that moves while they load, and goes on to show the fleet at work."""

    def __init__(self, name: str, model: str | None, detached: bool, live: Live, console: Console) -> None:
        self._name, self._model, self._detached = name, model, detached
        self._live, self._console = live, console
        self._spinner = Spinner("dots", style="cyan")
        self._is_ready = False

    def show(self, snapshot: Snapshot, stopping: bool = False) -> None:
        self._live.update(self._picture(snapshot, stopping))

    def ready(self, snapshot: Snapshot, seconds: float) -> None:
        self._is_ready = True
        table = Table.grid(padding=(0, 3))
        for label, text in _pointers(self._name, snapshot, self._detached):
            table.add_row(Text(label, style="dim"), Text(text, style="bold" if label in ("endpoint", "try") else ""))
        headline = Text.assemble(("✔ ", "green"), (self._name, "bold"), f" is ready after {seconds:.1f}s")
        self._console.print(Group(Text(), headline, Text(), Padding(table, (0, 2)), Text()))

    def note(self, text: str) -> None:
        self._console.print(text)

    def failed(self, message: str, detail: str = "", what: str = "could not start") -> None:
        self._live.stop()  # it would erase what is printed to the other stream
        error = Console(stderr=True, highlight=False)
        error.print(Text.assemble(("✗ ", "red"), (self._name, "bold"), f" {what}"))
        error.print(Padding(Text(message), (0, 2)))
        if detail:
            error.print(Padding(Text(detail, style="dim"), (1, 2)))

    def stopped(self) -> None:
        self._live.stop()
        self._console.print(Text.assemble(("✔ ", "green"), (self._name, "bold"), " is stopped; nothing is left of it"))

    def _picture(self, snapshot: Snapshot, stopping: bool) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for agent in snapshot.agents:
            mark, style = _MARKS.get(agent.phase, (None, "cyan"))
            left = Text(mark, style=style) if mark else self._spinner
            table.add_row(left, agent.name, Text(agent.phrase, style=style), Text(_work(agent) or _elapsed(agent), style="dim"))
            if agent.problem and agent.phase == "Restarting":
                table.add_row("", "", Text(agent.problem, style="red"), "")
        if not snapshot.agents:
            table.add_row(self._spinner, self._name, Text("stopping" if stopping else "starting", style="cyan"), "")
        parts: list[RenderableType] = []
        if not self._is_ready and self._model:
            parts += [Text.assemble((self._name, "bold"), "  ", (self._model, "dim"))]
        parts += [Padding(table, (0, 2))]
        if stopping:
            parts += [Padding(Text("stopping" + _streams(snapshot), style="yellow"), (1, 2, 0, 2))]
        elif self._is_ready and (line := _vitals(snapshot)):
            parts += [Padding(Text(line, style="dim"), (1, 2, 0, 2))]
        return Group(*parts)


def _pointers(name: str, snapshot: Snapshot, detached: bool) -> list[tuple[str, str]]:
    return [
        ("endpoint", snapshot.endpoint or ""),
        ("try", TRY),
        ("look", f"decodefleet get  ·  decodefleet describe {name}"),
        ("stop", f"decodefleet down {name}" if detached else "Ctrl-C"),
    ]


def _work(agent: Agent) -> str:
    if agent.running is None or agent.phase not in ("Serving", "Draining"):
        return ""
    return f"{agent.running} running  {agent.waiting} waiting"


def _elapsed(agent: Agent) -> str:
    if agent.since is None or agent.phase in ("Serving", "Ended", "Restarting"):
        return ""
    seconds = time.time() - agent.since
    return f"{seconds:.1f}s" if seconds < 60 else age(seconds)


def _vitals(snapshot: Snapshot) -> str:
    status = snapshot.status
    parts = []
    if (rate := status.get("tokensPerSecond")) is not None:
        parts.append(f"{rate:g} tok/s")
    if (attainment := (status.get("sla") or {}).get("attainment")) is not None:
        parts.append(f"SLA {attainment}")
    if (desired := (status.get("autoscaling") or {}).get("desired")) is not None:
        parts.append(f"desired {desired}")
    return "  ·  ".join(parts)


def _streams(snapshot: Snapshot) -> str:
    count = snapshot.open_streams
    if not count:
        return ""
    return f": {count} stream{'s are' if count > 1 else ' is'} still open (Ctrl-C again ends {'them' if count > 1 else 'it'})"
