"""Matrices in the native kernels' layout: tiles of 16 outputs, blocks of 32 inputs, four inputs of each output side by side."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.native import Format
from decodefleet_agent.engine.weights import Blocks

TILE, BLOCK = 16, 32
_CHUNK = 32 << 20
_ALIGNMENT = 64
_HEADER = {Format.Q4_0: 2, Format.Q4_1: 4, Format.Q8_0: 2}  # bytes of scale and minimum before a block's values


class Arena:
    """Memory for many arrays in a few large pieces, on huge pages where the system gives them."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """That many bytes, zero, aligned to a cache line."""
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if rounded > self._left.size:
            memory = mmap.mmap(-1, max(rounded, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = np.frombuffer(memory, np.uint8)
        taken, self._left = self._left[:size], self._left[rounded:]
        return taken


@dataclass(frozen=True)
class Packed:
    """A matrix as the kernels read it. `linear` holds addresses of the arrays."""

    format: Format
    data: np.ndarray
    output_scale: np.ndarray | None
    bias: np.ndarray | None
    linear: native.Linear


def pack_blocks(blocks: Blocks, bias: np.ndarray | None, arena: Arena) -> Packed:
    """Blocks of a file, their values unchanged."""
    form = Format[blocks.format]
    header = _HEADER[form]
    outputs, row_bytes = blocks.data.shape
    block = header + (BLOCK if form == Format.Q8_0 else BLOCK // 2)
    count = row_bytes // block
    tiles = -(-outputs // TILE)
    rows = np.zeros((tiles * TILE, row_bytes), np.uint8)
    rows[:outputs] = blocks.data
    parts = rows.reshape(tiles, TILE, count, block).transpose(0, 2, 1, 3)  # [tiles, blocks, outputs, bytes]
    packed = arena.take(tiles * count * TILE * block).reshape(tiles, count, TILE * block)
    for field in range(0, header, 2):
        packed[:, :, field * TILE : (field + 2) * TILE] = parts[..., field : field + 2].reshape(tiles, count, 2 * TILE)
    packed[:, :, header * TILE :] = _interleaved(parts[..., header:])
    return _packed(form, packed, None, bias, outputs, count * BLOCK)


def pack_rotated(weight: torch.Tensor, bias: np.ndarray | None, arena: Arena) -> Packed:
    """[outputs, inputs] fp32, rotated along the inputs, then int8 with one scale per output."""
    outputs, inputs = weight.shape
    rotated = rotate(weight, rotation_width(inputs))
    tiles, count = -(-outputs // TILE), inputs // BLOCK
    scale = arena.take(tiles * TILE * 4).view(np.float32)
    scale[:outputs] = rotated.abs().amax(dim=1) / 127
    values = np.zeros((tiles * TILE, inputs), np.int8)
    safe = torch.from_numpy(np.where(scale[:outputs] > 0, scale[:outputs], 1))
    values[:outputs] = torch.round(rotated / safe[:, None]).to(torch.int8).numpy()
    parts = values.view(np.uint8).reshape(tiles, TILE, count, BLOCK).transpose(0, 2, 1, 3)
    packed = arena.take(tiles * count * TILE * BLOCK).reshape(tiles, count, TILE * BLOCK)
    packed[:] = _interleaved(parts)
    return _packed(Format.INT8_ROTATED, packed, scale, bias, outputs, inputs)


def rotation_width(inputs: int) -> int:
    """Inputs that are rotated together."""
    return 64 if inputs % 64 == 0 else 32


def rotate(x: torch.Tensor, width: int) -> torch.Tensor:
    """The normalised Hadamard transform, its own inverse, of each `width` values of the last dimension."""
    hadamard = torch.ones(1, 1)
    while len(hadamard) < width:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], dim=1), torch.cat([hadamard, -hadamard], dim=1)])
    return (x.unflatten(-1, (-1, width)) @ (hadamard * width**-0.5)).flatten(-2)


def _interleaved(parts: np.ndarray) -> np.ndarray:
    """[tiles, blocks, outputs, bytes] to [tiles, blocks, bytes of all outputs]: four bytes of each output after another."""
    tiles, count, outputs, size = parts.shape
    return parts.reshape(tiles, count, outputs, size // 4, 4).swapaxes(2, 3).reshape(tiles, count, outputs * size)


def _packed(form: Format, data: np.ndarray, scale: np.ndarray | None, bias: np.ndarray | None, outputs: int, inputs: int) -> Packed:
    linear = native.Linear(
        data=native.address(data),
        output_scale=None if scale is None else native.address(scale),
        bias=None if bias is None else native.address(bias),
        format=form,
        outputs=outputs,
        inputs=inputs,
    )
    return Packed(form, data, scale, bias, linear)
