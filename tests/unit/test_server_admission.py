"""What a full queue answers, also while the engine's own counts lag behind."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from decodefleet_agent.server.agent import Agent
from decodefleet_agent.server.errors import Refused


@pytest.mark.parametrize(("running", "waiting", "in_flight"), [(0, 0, 6), (4, 1, 6)])
def test_a_full_queue_tells_how_many_wait(running: int, waiting: int, in_flight: int) -> None:
    agent = MagicMock(
        max_waiting=2,
        in_flight=in_flight,
        waiting=waiting,
        config=SimpleNamespace(engine=SimpleNamespace(batching=SimpleNamespace(max_batch=4))),
        stats=SimpleNamespace(running=running, waiting=waiting),
    )
    with pytest.raises(Refused, match="the queue is full: 2 wait and at most 2 may"):
        Agent.admit(agent, MagicMock(samples=[1], prompt_ids=[1], max_tokens=1))
