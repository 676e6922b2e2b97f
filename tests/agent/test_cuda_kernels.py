"""Each kernel of the cuda backend, in Triton's interpreter, against a PyTorch emulation; and that each compiles for GPUs.

The checks themselves are those of `make gpu-check`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it has no build for this system")
TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import cuda_checks  # noqa: E402

from decodefleet_agent.engine import sampling  # noqa: E402
from decodefleet_agent.engine.backends.cuda_plan import padded_decode, plan, views  # noqa: E402
from decodefleet_agent.engine.backends.triton_kernels.sampling import sample  # noqa: E402
from decodefleet_agent.engine.batch import Batch, Span  # noqa: E402
from decodefleet_agent.messages import Sampling  # noqa: E402

CHECKS: dict[str, Callable[[], Iterator[cuda_checks.Check]]] = {
    "products": cuda_checks.products,
    "elementwise": cuda_checks.elementwise,
    "writing": cuda_checks.writing,
    "writing heads of 128": lambda: cuda_checks.writing(4, 4, 128),
    "attention": cuda_checks.attention,
    "attention of heads of 128 on one": lambda: cuda_checks.attention(8, 1, 128),
    "attention of more heads on one than a tile's rows": lambda: cuda_checks.attention(20, 1, 64),
    "sampling": cuda_checks.sampling,
}


@pytest.mark.parametrize("checks", CHECKS)
def test_kernels_against_emulations(checks: str) -> None:
    made = list(CHECKS[checks]())
    assert made
    assert all(check.passed for check in made), "\n".join(map(str, made))


def test_tokens_are_those_that_the_host_draws() -> None:
    generator = np.random.default_rng(9)
    logits = (generator.normal(size=(14, 300)) * 2).astype(np.float32)
    keys = cuda_checks.sampling_keys(14, generator)
    got = sample(*(torch.from_numpy(array) for array in (logits, *keys))).tolist()
    wanted = []
    for row, temperature, top_k, seed, index, position in zip(logits, *keys, strict=True):
        asked = Sampling(seed=int(seed) % 2**64, sample_index=int(index), temperature=float(temperature), top_k=int(top_k))
        wanted.append(sampling.sample(row, asked, [0] * int(position), []))
    assert got == wanted


def test_a_greedy_token_is_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4700, 77, 4900]] = 2.0
    logits[1, ::2] = -0.0
    logits[2] = -5.0
    nothing = [torch.zeros(3, dtype=dtype) for dtype in (torch.float64, *[torch.int64] * 4)]
    assert sample(logits, *nothing).tolist() == [77, 0, 0]


def test_top_k_never_draws_another() -> None:
    """Equals at the border: the lowest ids are the candidates, and all of them are drawn."""
    rows = 10
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0]).repeat(rows, 1)
    integers = (torch.full((rows,), 2), torch.arange(rows), torch.zeros(rows, dtype=torch.int64), torch.arange(rows))
    assert set(sample(logits, torch.ones(rows, dtype=torch.float64), *integers).tolist()) == {1, 2}


def test_a_plan_says_where_every_row_goes() -> None:
    spans = (Span(0, (7, 3), 14, 4, True), Span(1, (9,), 0, 2, False), Span(2, (5, 4, 6), 32, 1, True))
    planned = plan(Batch(np.arange(7), spans), tile_tokens=3)
    seen = views(torch.from_numpy(planned.numbers), planned.shapes)
    assert seen.token_ids.tolist() == list(range(7))
    assert seen.positions.tolist() == [14, 15, 16, 17, 0, 1, 32]
    assert seen.slots.tolist() == [7 * 16 + 14, 7 * 16 + 15, 3 * 16, 3 * 16 + 1, 9 * 16, 9 * 16 + 1, 6 * 16]
    assert seen.sampled.tolist() == [3, 6]
    tiles = (seen.tiles.row, seen.tiles.tokens, seen.tiles.position, seen.tiles.span)
    assert [tile.tolist() for tile in tiles] == [[0, 3, 4, 6], [3, 1, 2, 1], [14, 17, 0, 32], [0, 0, 1, 2]]
    assert seen.page_table.tolist() == [[7, 3, 0], [9, 0, 0], [5, 4, 6]]
    assert planned.partitions == 1
    assert all(tensor.storage_offset() % 32 == 0 for tensor in (seen.positions, seen.sampled, *tiles, seen.page_table))


def test_decode_batches_are_filled_up_to_powers_of_two() -> None:
    spans = tuple(Span(number, (number,), 3, 1, True) for number in range(5))
    batch = Batch(np.arange(5), spans)
    padded = padded_decode(batch, 99)
    assert padded is not None
    assert padded.rows == 8
    assert padded.spans[:5] == spans
    assert {(span.pages, span.start) for span in padded.spans[5:]} == {((99,), 0)}
    assert padded_decode(Batch(np.arange(4), spans[:4]), 99).rows == 4  # type: ignore[union-attr]
    assert padded_decode(Batch(np.arange(6), (*spans[:4], Span(4, (4,), 0, 2, True))), 99) is None
    assert padded_decode(Batch(np.arange(5), (*spans[:4], Span(4, (4,), 0, 1, False))), 99) is None


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Without one: the interpreter takes much that the compiler refuses."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(TOOLS / "cuda_compile.py"), "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {line.split()[1] for line in done.stdout.splitlines()}
    assert kernels == {"_linear", "_rms_norm", "_swiglu", "_write", "_partials", "_combine", "_sample"}
