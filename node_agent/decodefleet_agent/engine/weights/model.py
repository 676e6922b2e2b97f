"""What every weight file is read into: the dimensions of a Llama-like decoder, and its tensors by name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from decodefleet_agent.model_files import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2")
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of formats with blocks of 32 and nothing above the block


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and a SwiGLU MLP."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    context_length: int
    rms_norm_eps: float
    inverse_frequencies: tuple[float, ...]  # head_dim // 2 rotary frequencies, scaling applied
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} attention heads do not divide among {self.kv_heads} key-value heads; the model's file is broken"
            )


@dataclass(frozen=True)
class Blocks:
    """A matrix as GGUF stores it: rows of blocks of 32 inputs, each block its scale (and minimum) in fp16 before its values."""

    format: str  # one of BLOCK_BYTES
    data: np.ndarray  # [outputs, bytes of a row] uint8


@dataclass(frozen=True)
class Weights:
    """A model: its dimensions and its tensors, under the names of Hugging Face's Llama ("model.layers.0.self_attn.q_proj.weight").

    `readers` hold functions that read one tensor from its file as fp32, so that a loader's peak memory is the model and one tensor;
    `block_readers` read some of them as they are stored.
    """

    config: ModelConfig
    format: str  # the number format that most parameters are stored in, such as "Q4_1" or "BF16"
    parameters: int
    fingerprint: str  # hash of what the file holds
    readers: Mapping[str, Callable[[], torch.Tensor]]
    block_readers: Mapping[str, Callable[[], Blocks]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.readers

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor as fp32. Raises ModelError where it is missing or has another shape."""
        if name not in self.readers:
            raise ModelError(f"the model's file has no tensor {name}; it is incomplete, download it again")
        tensor = self.readers[name]()
        _check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def read_blocks(self, name: str, shape: tuple[int, ...]) -> Blocks:
        """One matrix of `block_readers` as it is stored. Raises ModelError where it has another shape."""
        blocks = self.block_readers[name]()
        rows, row_bytes = blocks.data.shape
        _check_shape(name, (rows, row_bytes // BLOCK_BYTES[blocks.format] * 32), shape)
        return blocks


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ModelError(f"tensor {name} has shape {found}, and the model's configuration asks for {wanted}; the file is broken")


def rotary_frequencies(head_dim: int, base: float, scaling: Mapping[str, object] | None) -> tuple[float, ...]:
    """Inverse frequencies of rotary positions in fp32, with linear or Llama 3 scaling. Raises ModelError for another scaling."""
    frequencies = 1.0 / (torch.tensor(base, dtype=torch.float32) ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    kind = str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")
    if kind in ("default", "none"):
        return tuple(frequencies.tolist())
    assert scaling is not None
    factor = float(scaling["factor"])  # type: ignore[arg-type]
    if kind == "linear":
        return tuple((frequencies / factor).tolist())
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])  # type: ignore[arg-type]
        original = float(scaling["original_max_position_embeddings"])  # type: ignore[arg-type]
        wavelength = 2 * math.pi / frequencies
        smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return tuple(((1 - smooth) * frequencies / factor + smooth * frequencies).tolist())
    raise ModelError(f"rotary scaling {kind!r} is not supported; use a model with none, linear or llama3 scaling")


class Fingerprint:
    """Hash of a model's content: every name, type and shape, small tensors whole, and 16 windows of each large one."""

    _WINDOW = 4096
    _WINDOWS = 16

    def __init__(self, *header: object) -> None:
        self._hash = hashlib.sha256(repr(header).encode())

    def add(self, name: str, kind: str, shape: tuple[int, ...], data: np.ndarray) -> None:
        """`data` is the tensor's stored bytes, flat uint8."""
        self._hash.update(repr((name, kind, shape, data.size)).encode())
        if data.size <= self._WINDOW * self._WINDOWS:
            self._hash.update(data.tobytes())
            return
        for start in np.linspace(0, data.size - self._WINDOW, self._WINDOWS).astype(int):
            self._hash.update(data[start : start + self._WINDOW].tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
