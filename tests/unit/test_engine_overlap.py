"""A step is told while the next one runs: beside the backend, and with the engine at rest."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engine_world import start, submit

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.sampling import token_logprob
from decodefleet_agent.messages import Sampling, Submit

PATIENCE = 10.0


def test_what_runs_meanwhile_runs_beside_the_backend() -> None:
    streams = start()
    honest, begun, told = streams.backend.step, threading.Event(), threading.Event()

    def tell() -> None:
        assert begun.wait(PATIENCE), "it had to end before the backend began"
        told.set()

    def step(batch: Batch) -> np.ndarray:
        begun.set()
        assert told.wait(PATIENCE), "the backend had to end first"
        return honest(batch)

    streams.backend.step = step  # type: ignore[method-assign]
    streams.handle(submit(1, [1, 2, 3], 2))
    streams.engine.advance(tell)
    assert streams.engine.sequences[1].tokens[:3] == [1, 2, 3] and len(streams.engine.sequences[1].tokens) == 4


def test_a_step_that_is_told_late_says_the_same() -> None:
    late, at_once = start(), start()
    for streams in (late, at_once):
        streams.handle(submit(1, [1] * 20, 5), submit(2, [2] * 3, 9))
    results = []
    step = late.engine.advance()
    while late.engine.busy:
        step = late.engine.advance(lambda step=step: results.append(late.engine.report(step)))
        late.engine.check_integrity()
    results.append(late.engine.report(step))
    for result in results:
        wanted = at_once.engine.step()
        said = [[(o.sequence_id, o.token_ids, o.finish) for o in one.outputs] for one in (result, wanted)]
        assert said[0] == said[1]
        assert (result.stats.batch, result.stats.batch_tokens) == (wanted.stats.batch, wanted.stats.batch_tokens)
    assert not at_once.engine.busy
    assert results[-1].stats.generated_tokens == 14 and results[-1].stats.kv_bytes_used == 0


def test_a_failure_meanwhile_is_the_caller_s() -> None:
    streams = start()
    streams.handle(submit(1, [1], 3))

    def failing() -> None:
        raise ConnectionError("the server is gone")

    with pytest.raises(ConnectionError, match="the server is gone"):
        streams.engine.advance(failing)


def test_log_probabilities_are_those_of_the_step_although_the_next_one_has_run() -> None:
    """A backend's logits are valid until its next step only."""
    streams = start()
    honest, buffer, seen = streams.backend.step, np.empty((1, 50), np.float32), []

    def step(batch: Batch) -> np.ndarray:
        buffer[:] = honest(batch) + np.float32(len(seen))
        buffer[0, 7] = len(seen)  # another distribution each time
        seen.append(buffer[0].copy())
        return buffer

    streams.backend.step = step  # type: ignore[method-assign]
    streams.handle(Submit(1, [1, 2], Sampling(seed=1, max_tokens=4, logprobs=2)))
    steps = [streams.engine.advance() for _ in range(4)]
    for step, logits in zip(steps, seen, strict=True):
        (output,) = streams.engine.report(step).outputs
        assert output.logprobs == [token_logprob(logits, output.token_ids[0], 2)]
