"""The native library as ctypes sees it: the structures and functions of native/abi.h."""

from __future__ import annotations

import ctypes as c
import enum
import functools
import os
from pathlib import Path

import numpy as np

LIBRARY = Path(__file__).with_name("libdecodefleet.so")
TIER_VARIABLE = "DECODEFLEET_CPU_TIER"


class Format(enum.IntEnum):
    """df_format"""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    INT8_ROTATED = 3


class KVFormat(enum.IntEnum):
    """df_kv_format"""

    fp32 = 0
    int8 = 1
    fp8 = 2


class SparsityPolicy(enum.IntEnum):
    """df_sparsity, by the names of the configuration"""

    None_ = 0
    SlidingWindow = 1
    Hierarchical = 2


class Linear(c.Structure):
    _fields_ = (
        ("data", c.c_void_p),
        ("output_scale", c.c_void_p),
        ("bias", c.c_void_p),
        ("format", c.c_int32),
        ("outputs", c.c_int32),
        ("inputs", c.c_int32),
        ("padding", c.c_int32),
    )


class Layer(c.Structure):
    _fields_ = (
        ("input_norm", c.c_void_p),
        ("mlp_norm", c.c_void_p),
        *((name, Linear) for name in ("q", "k", "v", "output", "gate", "up", "down")),
    )


class Model(c.Structure):
    _fields_ = (
        ("layer", c.POINTER(Layer)),
        ("norm", c.c_void_p),
        ("cosine", c.c_void_p),
        ("sine", c.c_void_p),
        ("embedding", Linear),
        ("head", Linear),
        *((name, c.c_int32) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "kv_format")),
        ("epsilon", c.c_float),
        *((name, c.c_int32) for name in ("sparsity", "sinks", "window", "budget")),
    )


class Batch(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("token_ids", "span_start", "span_length", "page_offset", "pages", "sampled", "logits")),
        *((name, c.c_int32) for name in ("rows", "spans", "samples")),
    )


class Draw(c.Structure):
    _fields_ = (
        *((name, c.c_double) for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")),
        *((name, c.c_uint64) for name in ("seed", "sample", "position")),
        ("token_ids", c.c_void_p),
        *((name, c.c_int32) for name in ("tokens", "prompt_tokens", "top_k", "padding")),
    )


_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "df_tier": (c.c_char_p, [c.c_char_p]),
    "df_page_bytes": (c.c_int64, [c.POINTER(Model)]),
    "df_create": (c.c_void_p, [c.POINTER(Model), c.c_char_p, c.c_int32]),
    "df_destroy": (None, [c.c_void_p]),
    "df_set_pool": (None, [c.c_void_p, c.c_void_p, c.c_int64]),
    "df_step": (None, [c.c_void_p, c.POINTER(Batch)]),
    "df_sample": (None, [c.c_void_p, c.c_void_p, c.c_int32, c.c_int32, c.POINTER(Draw), c.c_void_p]),
    "df_bytes_read": (c.c_int64, [c.c_void_p]),
    "df_products": (None, [c.c_void_p, c.c_int32, c.c_int32]),
    "df_linear_rows": (None, [c.c_char_p, c.POINTER(Linear), c.c_void_p, c.c_int32, c.c_void_p]),
    "df_embed": (None, [c.c_char_p, c.POINTER(Linear), c.c_int32, c.c_void_p]),
    "df_rms_norm": (None, [c.c_char_p, c.c_void_p, c.c_void_p, c.c_int32, c.c_float, c.c_void_p]),
    "df_swiglu": (None, [c.c_char_p, c.c_void_p, c.c_void_p, c.c_int32, c.c_void_p]),
    "df_uniform": (c.c_double, [c.c_uint64, c.c_uint64, c.c_uint64]),
    "df_sample_rows": (None, [c.c_char_p, c.c_void_p, c.c_int32, c.c_int32, c.POINTER(Draw), c.c_void_p]),
    "df_attention": (
        None,
        [c.c_char_p, c.POINTER(Model), c.POINTER(Batch), c.c_void_p, c.c_void_p, c.c_int64, c.c_int32, c.c_void_p],
    ),
}


@functools.cache
def library() -> c.CDLL:
    """The loaded library. Raises OSError where it was not built, or does not load."""
    loaded = c.CDLL(str(LIBRARY))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def tier(name: str | None = None) -> str | None:
    """The instruction-set tier that runs: the named one, the one that the environment forces, else the best. None if it cannot run here."""
    name = name or os.environ.get(TIER_VARIABLE) or None
    found = library().df_tier(name.encode() if name else None)
    return found.decode() if found else None


def address(array: np.ndarray) -> int:
    """Of the first element of a contiguous array, which the caller keeps alive."""
    return array.ctypes.data
