"""Describes to the native library how rows of logits are sampled: what engine/sampling.py does, on the engine's threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.sampling import Draw, penalises

_DRAW = struct.Struct("=6d3QQ4i")  # native.Draw; packing it costs a tenth of what setting its fields does
_MOST = 2**31 - 1  # of what top-k can say


class Draws:
    """`address` is of an array of df_draw that lives as long as this; None where every row takes its likeliest token."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        self.address: ctypes.Array[native.Draw] | None = None
        self._tokens: list[np.ndarray] = []
        if any(draw.sampling.temperature or penalises(draw.sampling) for draw in draws):
            packed = b"".join([self._packed(draw) for draw in draws])
            self.address = (native.Draw * len(draws)).from_buffer_copy(packed)

    def _packed(self, draw: Draw) -> bytes:
        sampling, length, address = draw.sampling, len(draw.tokens), 0
        if penalises(sampling):
            self._tokens.append(np.array(draw.tokens, np.int32))
            address = native.address(self._tokens[-1])
        return _DRAW.pack(
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.seed,
            sampling.sample_index,
            length,
            address,
            length,
            draw.prompt_length,
            min(sampling.top_k, _MOST),
            0,
        )
