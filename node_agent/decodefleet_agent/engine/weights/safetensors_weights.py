"""Weights from a Hugging Face directory: config.json beside one or several safetensors files."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodefleet_agent.engine.weights.model import ARCHITECTURES, Fingerprint, ModelConfig, Weights, rotary_frequencies
from decodefleet_agent.model_files import ModelError

_FLOATS = {"F32", "F16", "BF16", "F64"}
_IGNORED = "rotary_emb.inv_freq"


def load(directory: Path) -> Weights:
    """Opens a Hugging Face model directory. Raises ModelError."""
    from safetensors import SafetensorError, safe_open

    raw = _json(directory / "config.json")
    files = _files(directory)
    readers = {}
    sizes: Counter[str] = Counter()
    entries: list[tuple[str, str, tuple[int, ...], Path]] = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                    part = file.get_slice(name)
                    entries.append((name, part.get_dtype(), tuple(part.get_shape()), path))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    for name, dtype, shape, path in entries:
        if name.endswith(_IGNORED):
            continue
        if dtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name} is stored as {dtype}, which is not supported; use a model in F32, F16 or BF16, or a GGUF file"
            )
        sizes[dtype] += int(np.prod(shape))
        readers[name] = functools.partial(_read, path, name)
    config = _config(directory, raw, readers)
    if config.tied_embeddings:
        readers.pop("lm_head.weight", None)
    fingerprint = Fingerprint("safetensors", config)
    for name, dtype, shape, path in sorted(entries):
        fingerprint.add(name, dtype, shape, _bytes(path, name))
    return Weights(config, sizes.most_common(1)[0][0] if sizes else "F32", sum(sizes.values()), fingerprint.hexdigest(), readers)


def _config(directory: Path, raw: dict[str, Any], readers: dict[str, Any]) -> ModelConfig:
    architecture = str(raw.get("model_type"))
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{directory}: model_type {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: activation {raw['hidden_act']!r} is not supported; use a model with silu")
    if raw.get("quantization_config"):
        raise ModelError(f"{directory}: quantized checkpoints are not supported; use the model in F32, F16 or BF16, or a GGUF file")
    try:
        heads = int(raw["num_attention_heads"])
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        base = float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)
        return ModelConfig(
            architecture=architecture,
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            vocabulary_size=int(raw["vocab_size"]),
            context_length=_context_length(architecture, raw),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            inverse_frequencies=rotary_frequencies(head_dim, base, rope),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)) or "lm_head.weight" not in readers,
            eos_token_ids=_eos(directory, raw),
        )
    except KeyError as error:
        raise ModelError(f"{directory / 'config.json'} lacks {error.args[0]}; download the model again") from error


def _context_length(architecture: str, raw: dict[str, Any]) -> int:
    """Sliding-window models are exact up to their window, and are served up to it."""
    context = int(raw["max_position_embeddings"])
    window = raw.get("sliding_window") if architecture == "mistral" or raw.get("use_sliding_window") else None
    return min(context, int(window)) if window else context


def _eos(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    value = _json(generation).get("eos_token_id") if generation.is_file() else None
    value = raw.get("eos_token_id") if value is None else value
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in values))


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in sorted(set(_json(index).get("weight_map", {}).values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(f"{directory} lacks {', '.join(missing)}, which its index names; download the model again")
    if not files:
        raise ModelError(f"{directory} holds config.json and no .safetensors file; convert the model to safetensors")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; download the model again")
    return value


def _read(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name).to(torch.float32, copy=True)


def _bytes(path: Path, name: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name).reshape(-1).view(torch.uint8).numpy()
