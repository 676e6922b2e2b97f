"""The articles' names, as their readers would use them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import decodefleet_agent
from decodefleet.v1 import control_pb2
from decodefleet_agent import BatchController, MemoryPool, dynamic_chunk_scheduler

CURVE = [control_pb2.WarmUp.CurvePoint(batch=n, step_seconds=0.001 + 0.0005 * n, tokens_per_second=1) for n in (1, 4, 16)]
WARM = control_pb2.WarmUp(curve=CURVE)


def test_what_the_package_offers() -> None:
    assert decodefleet_agent.__all__ == ["BatchController", "MemoryPool", "dynamic_chunk_scheduler"]
    assert dynamic_chunk_scheduler(1024, 8) == 96
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = decodefleet_agent.Nothing
    code = "import decodefleet_agent, sys; assert not {'numpy', 'torch', 'msgspec'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(pending=st.integers(0, 1000), objective=st.none() | st.floats(1e-4, 1))
def test_never_more_than_are_pending_nor_than_was_measured(pending: int, objective: float | None) -> None:
    size = BatchController(WARM, objective).determine_batch(pending)
    assert size == BatchController(WARM, objective).determine_batch(range(pending))
    assert min(pending, 1) <= size <= min(pending, 16)


def test_the_objective_bounds_the_batch() -> None:
    assert BatchController(WARM).determine_batch(["a"] * 40) == 16
    assert BatchController(WARM, time_per_output_token=0.005).determine_batch(["a"] * 40) == 6
    with pytest.raises(ValueError, match="curve is empty"):
        BatchController(control_pb2.WarmUp())


def test_a_full_pool_is_a_memory_error_and_what_is_freed_is_there_again() -> None:
    pool = MemoryPool(100 * 4096)
    first = pool.allocate(60 * 4096)
    with pytest.raises(MemoryError, match="163840 are free"):
        pool.allocate(41 * 4096)
    assert pool.available == 40 * 4096
    pool.free(first)
    assert len(set(pool.allocate(99 * 4096 + 1))) == 100
    for bad in (lambda: MemoryPool(10), lambda: MemoryPool(4096).allocate(0)):
        with pytest.raises(ValueError):
            bad()
