"""Weights from GGUF files: llama.cpp's names and its permutation of query and key rows are undone here."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodefleet_agent.engine.weights.gguf_file import GGUFFile, GGUFTensor, read_gguf
from decodefleet_agent.engine.weights.model import ARCHITECTURES, BLOCK_BYTES, Blocks, Fingerprint, ModelConfig, Weights, rotary_frequencies
from decodefleet_agent.model_files import ModelError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def load(path: Path) -> Weights:
    """Opens a GGUF file of a Llama-like model. Raises ModelError."""
    from gguf.constants import GGMLQuantizationType

    file = read_gguf(path)
    config = _config(file)
    fingerprint = Fingerprint("gguf", config)
    sizes: Counter[int] = Counter()
    readers, block_readers = {}, {}
    for tensor in file.tensors.values():
        fingerprint.add(tensor.name, str(tensor.type), tensor.shape, tensor.data)
        sizes[tensor.type] += int(np.prod(tensor.shape))
        if tensor.name == _ROPE_FACTORS:
            continue
        name, heads = _hugging_face_name(path, tensor.name), _permuted_heads(config, tensor.name)
        readers[name] = functools.partial(_read, tensor, heads)
        if GGMLQuantizationType(tensor.type).name in BLOCK_BYTES:
            block_readers[name] = functools.partial(_read_blocks, tensor, heads)
    main = GGMLQuantizationType(_main_type(sizes, file)).name
    return Weights(config, main, sum(sizes.values()), fingerprint.hexdigest(), readers, block_readers)


def _config(file: GGUFFile) -> ModelConfig:
    fields: dict[str, Any] = file.fields
    architecture = str(fields.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{file.path}: architecture {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}")

    def need(key: str) -> Any:
        if f"{architecture}.{key}" not in fields:
            raise ModelError(f"{file.path} lacks the field {architecture}.{key}; convert the model again")
        return fields[f"{architecture}.{key}"]

    if fields.get(f"{architecture}.expert_count"):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported; use a dense model")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it is incomplete, download it again")
    heads = int(need("attention.head_count"))
    head_dim = int(fields.get(f"{architecture}.attention.key_length", need("embedding_length") // heads))
    if int(fields.get(f"{architecture}.rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{file.path} rotates only a part of each head, which is not supported; use another model")
    frequencies = rotary_frequencies(head_dim, float(fields.get(f"{architecture}.rope.freq_base", 10000.0)), _scaling(fields, architecture))
    if _ROPE_FACTORS in file.tensors:
        factors = _read(file.tensors[_ROPE_FACTORS], 0)
        frequencies = tuple((torch.tensor(frequencies) / factors).tolist())
    eos = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    return ModelConfig(
        architecture=architecture,
        hidden_size=int(need("embedding_length")),
        intermediate_size=int(need("feed_forward_length")),
        layers=int(need("block_count")),
        heads=heads,
        kv_heads=int(fields.get(f"{architecture}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocabulary_size=file.tensors["token_embd.weight"].shape[0],
        context_length=int(need("context_length")),
        rms_norm_eps=float(need("attention.layer_norm_rms_epsilon")),
        inverse_frequencies=frequencies,
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos)),
    )


def _scaling(fields: dict[str, Any], architecture: str) -> dict[str, object] | None:
    kind = fields.get(f"{architecture}.rope.scaling.type")
    return {"rope_type": kind, "factor": fields.get(f"{architecture}.rope.scaling.factor", 1.0)} if kind else None


def _main_type(sizes: Counter[int], file: GGUFFile) -> int:
    """The type of most parameters apart from the embedding, which is often kept finer than the rest."""
    rest = Counter(sizes)
    embedding = file.tensors["token_embd.weight"]
    rest[embedding.type] -= int(np.prod(embedding.shape))
    return rest.most_common(1)[0][0]


def _hugging_face_name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{kind}"
    raise ModelError(f"{path}: tensor {name} belongs to no supported architecture; use a Llama, Mistral or Qwen2 model")


def _permuted_heads(config: ModelConfig, name: str) -> int:
    """The number of heads whose rows llama.cpp interleaved in this tensor; 0 for none."""
    if config.architecture == "qwen2":
        return 0
    return config.heads if ".attn_q." in name else config.kv_heads if ".attn_k." in name else 0


def _read(tensor: GGUFTensor, permuted_heads: int) -> torch.Tensor:
    import gguf
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(tensor.type)
    block, size = GGML_QUANT_SIZES[kind]
    row_bytes = tensor.shape[-1] // block * size
    rows = tensor.data.reshape(-1, row_bytes)
    if kind == GGMLQuantizationType.F32:
        values = rows.view(np.float32)
    elif kind == GGMLQuantizationType.F16:
        values = rows.view(np.float16).astype(np.float32)
    else:
        try:
            values = gguf.dequantize(rows, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {tensor.name} is stored as {kind.name}, which cannot be read; convert the model to Q8_0, Q4_1 or Q4_0"
            ) from error
    result = torch.from_numpy(np.array(values, dtype=np.float32, copy=True)).reshape(tensor.shape)
    return _unpermuted(result, permuted_heads)


def _read_blocks(tensor: GGUFTensor, permuted_heads: int) -> Blocks:
    from gguf.constants import GGMLQuantizationType

    rows = torch.from_numpy(np.array(tensor.data.reshape(tensor.shape[0], -1)))
    return Blocks(GGMLQuantizationType(tensor.type).name, _unpermuted(rows, permuted_heads).numpy())


def _unpermuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours (2i, 2i+1) and stores rows for that; here the halves of a head are rotated together."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape) if heads else rows
