"""vLLM's build for CPUs, on the model in bf16 or fp32."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from decodefleet_agent.bench.peers.converted import directory_of
from decodefleet_agent.bench.protocol import Load, Loaded, Timing

_TYPES = {"bf16": "bfloat16", "fp32": "float32"}
_BYTES = {"bf16": 2, "fp32": 4}
_BLOCK = 128  # tokens; vLLM's default on CPUs


class Vllm:
    """See `Peer`."""

    def load(self, load: Load) -> Loaded:
        folder = directory_of(Path(load.path))
        config = json.loads((folder / "config.json").read_text())
        # In one process: no messages between steps, and its memory is all of the engine's. It takes OMP_NUM_THREADS as its threads.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
        import vllm

        self._engine = vllm.LLM(
            model=str(folder),
            dtype=_TYPES[load.format],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            # Compiling takes minutes a start, and a step of one sequence was no faster for it.
            enforce_eager=True,
            max_num_seqs=load.batch,
            kv_cache_memory_bytes=kv_bytes(config, load),
            # Scoring a window asks for a token after it.
            max_model_len=min(load.context + 1, config["max_position_embeddings"]),
        )
        self._requests = 0
        return Loaded(vllm.__version__, load.format, f"KV {load.format}, eager")

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE
        )
        engine = self._engine.llm_engine
        begun = time.perf_counter()
        counts: dict[str, int] = {}
        for prompt in prompts:
            self._requests += 1
            counts[str(self._requests)] = 0
            engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, settings)
        first, before = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if not first and all(counts.values()):
                first, before = time.perf_counter() - begun, sum(counts.values())
        total = time.perf_counter() - begun
        if set(counts.values()) != {new_tokens}:
            raise RuntimeError(f"{new_tokens} tokens were asked for, and the sequences have {sorted(set(counts.values()))}")
        return Timing(first, total, sum(counts.values()) - before)

    def logprobs(self, windows: list[list[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._engine.generate([{"prompt_token_ids": window} for window in windows], settings, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]
            for output in outputs
        ]

    def floor(self, rows: int) -> None:
        return None


def kv_bytes(config: dict[str, Any], load: Load) -> int:
    """Room for the keys and values of all sequences, so that none is preempted. `config` is the model's config.json."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    token = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size * _BYTES[load.format]
    blocks = load.batch * (load.context // _BLOCK + 2) + 1
    return blocks * _BLOCK * token


def create() -> Vllm:
    return Vllm()
