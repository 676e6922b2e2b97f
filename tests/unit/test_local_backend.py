"""The backend of one machine: what it tells of agents that end and of those that stop answering. No process is started."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from plan_world import load

from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.local import home
from decodefleet_operator.local.backend import UNANSWERED, LocalBackend
from decodefleet_operator.local.home import Fleet
from decodefleet_operator.local.process import AgentProcess

SPEC = DecoderDeployment.model_validate({"metadata": {"name": "a"}, "spec": {"model": {"uri": "file:///m"}}}).spec
LAST_WORDS = "the engine's process ended with signal 9"


class Agent:
    """An agent whose lives end when the test says so."""

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend
        self.lives: asyncio.Queue[int] = asyncio.Queue()

    @property
    def process(self) -> AgentProcess:
        return self.backend.processes()["p"]

    def answers(self, state: str = "SERVING", at: float | None = None) -> None:
        self.backend.observe(self.backend.key, self.backend.pods()[0], load(at=at or time.time(), state=state))

    def is_silent(self) -> None:
        for _ in range(UNANSWERED):
            self.backend.observe(self.backend.key, self.backend.pods()[0], None)

    async def ends(self) -> None:
        restarts = self.process.restarts
        self.lives.put_nowait(1)
        while self.process.restarts == restarts:
            await asyncio.sleep(0)

    def events(self) -> list[tuple[str, str, str, int]]:
        written = home.read(self.backend.fleet.events) or []
        return [(e["type"], e["reason"], e["message"], e["count"]) for e in written]


@contextlib.asynccontextmanager
async def agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    fleet = Fleet(folder / "a")
    fleet.path.mkdir()
    a = Agent(LocalBackend(fleet))

    async def life(process: AgentProcess) -> tuple[int, int]:
        process.log.parent.mkdir(parents=True, exist_ok=True)
        process.log.write_text(LAST_WORDS)
        return await a.lives.get(), 0

    monkeypatch.setattr(AgentProcess, "_run_once", life)
    a.backend._create("p", SPEC)
    yield a
    closing = asyncio.create_task(a.backend.close(0))
    a.lives.put_nowait(0)
    await asyncio.wait_for(closing, 60)


async def test_an_agent_that_is_ready_again_has_no_problem_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(tmp_path, monkeypatch) as a:
        a.answers()
        await a.ends()
        assert a.backend.pods()[0].problem == LAST_WORDS
        a.answers("LOADING")
        assert a.backend.pods()[0].problem == LAST_WORDS, "it is not well yet"
        a.answers()
        assert (a.process.problem, a.backend.pods()[0].restarts) == (None, 1)
        a.answers("WARMING_UP")
        assert a.backend.pods()[0].problem is None


async def test_silence_is_told_from_the_last_answer_until_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(tmp_path, monkeypatch) as a:
        a.is_silent()
        assert a.backend.pods()[0].silent_since is None, "it never was ready: it starts"
        a.answers(at=1000.0)
        a.is_silent()
        a.is_silent()
        view = a.backend.pods()[0]
        assert (view.ready, view.silent_since, view.problem) == (False, 1000.0, None)
        a.answers()
        view = a.backend.pods()[0]
        assert (view.ready, view.silent_since) == (True, None)
        a.is_silent()
        await a.ends()
        assert a.backend.pods()[0].silent_since is None


async def test_each_restart_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(tmp_path, monkeypatch) as a:
        a.answers()
        await a.ends()
        assert a.events() == [("Warning", "Restarting", f"p ended and is started again: {LAST_WORDS}", 1)]
        monkeypatch.setattr("decodefleet_operator.local.process.LONGEST_BACKOFF", 0.0)
        await a.ends()
        assert [count for *_, count in a.events()] == [2]


async def test_an_event_that_cannot_be_written_keeps_no_agent_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(tmp_path, monkeypatch) as a:
        a.backend.fleet.events.mkdir()
        await a.ends()
        assert (a.process.exit_code, a.process.restarts) == (None, 1)
