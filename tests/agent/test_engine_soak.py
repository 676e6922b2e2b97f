"""Random traffic on the native backend for a moment; `make soak-engine` does it for ten minutes, under sanitizers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from decodefleet_agent.engine.backends import native

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import soak_engine

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")


@pytest.mark.parametrize("threads", [1, 2])
def test_random_traffic_loses_no_page_and_changes_no_token(tmp_path: Path, threads: int) -> None:
    served = soak_engine.backend(tmp_path, threads)
    tally = soak_engine.soak(served, seconds=1, seed=threads)
    assert tally.finished > 20 and tally.preemptions and tally.cached_prompt_tokens and tally.cancelled
    soak_engine.compare(served, tally)
