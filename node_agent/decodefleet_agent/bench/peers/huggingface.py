"""Hugging Face transformers: `generate` on a model in fp32 or bf16."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers

from decodefleet_agent.bench.peers.converted import unpacked
from decodefleet_agent.bench.protocol import Load, Loaded, Timing

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Clock(transformers.StoppingCriteria):
    """Is asked after every token whether to stop; never does."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class HuggingFace:
    """See `Peer`."""

    def load(self, load: Load) -> Loaded:
        torch.set_num_threads(load.threads)
        self._model = unpacked(Path(load.path), _TYPES[load.format]).eval()
        settings = self._model.generation_config
        settings.eos_token_id, settings.pad_token_id = None, 0
        settings.do_sample, settings.temperature, settings.top_p, settings.top_k = False, None, None, None
        return Loaded(transformers.__version__, load.format, f"torch {torch.__version__}")

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        clock = _Clock()
        ids = torch.tensor(prompts)
        begun = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        if len(clock.times) != new_tokens:
            raise RuntimeError(f"{new_tokens} tokens were asked for, and {len(clock.times)} came")
        return Timing(clock.times[0] - begun, clock.times[-1] - begun, len(prompts) * (new_tokens - 1))

    @torch.inference_mode()
    def logprobs(self, windows: list[list[int]]) -> list[list[float]]:
        result = []
        for window in windows:
            ids = torch.tensor(window)
            logits = self._model(ids[None]).logits[0, :-1].float()
            result.append((logits.gather(1, ids[1:, None])[:, 0] - logits.logsumexp(dim=1)).tolist())
        return result

    def floor(self, rows: int) -> None:
        return None


def create() -> HuggingFace:
    return HuggingFace()
