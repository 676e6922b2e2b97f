"""Cosines and sines of rotary positions."""

from __future__ import annotations

import numpy as np

from decodefleet_agent.engine.weights import ModelConfig


def rotary_tables(config: ModelConfig, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """[context, head_dim / 2] fp32 each: fp32 angles, as transformers has them; cosines rounded from fp64, the same everywhere."""
    angles = np.outer(np.arange(context_length, dtype=np.float32), np.asarray(config.inverse_frequencies, np.float32)).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
