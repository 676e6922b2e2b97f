"""A report as a table on the terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from decodefleet_agent.bench.catalog import OURS
from decodefleet_agent.bench.report import Comparison, Report, Result, at, best_peer, comparisons, points

_COLUMNS = ("engine", "format", "tok/s", "spread", "vs best", "TTFT", "TPOT", "memory", "ppl")
_WIDTH = 90  # columns that the table needs where nobody says how many there are


def show(report: Report, console: Console) -> None:
    """One table per batch and context, the fastest engine first, with the comparison below; then what is absent."""
    for batch, context in points(report.results):
        results = at(report.results, (batch, context))
        best = best_peer(results)
        title = f"batch {batch}, context {context}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("engine", "format") else "right")
        for result in results:
            table.add_row(*_cells(result, best), style="bold" if result.engine == OURS.name else None)
        console.print(table)
        for line in _comparisons(results):
            console.print(line, markup=False)
        console.print()
    for line in _notes(report):
        console.print(line, markup=False, soft_wrap=True)


def console() -> Console:
    """Standard output, wide enough where it is no terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=max(plain.width, _WIDTH))


def draw(report: Report, path: Path) -> None:
    """A bar per engine and format, a panel per batch and context. The file's ending names its kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = points(report.results)
    height = max(len(at(report.results, point)) for point in panels) * 0.45 + 1.3
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, height * len(panels)), squeeze=False, layout="constrained")
    for axis, (batch, context) in zip(axes[:, 0], panels, strict=True):
        results = [r for r in at(report.results, (batch, context)) if r.tokens_per_second is not None][::-1]
        rates = [r.tokens_per_second or 0 for r in results]
        spans = [
            [rate - (r.tokens_per_second_low or 0) for rate, r in zip(rates, results, strict=True)],
            [(r.tokens_per_second_high or 0) - rate for rate, r in zip(rates, results, strict=True)],
        ]
        colours = ["#d9480f" if r.engine == OURS.name else "#868e96" for r in results]
        names = [f"{r.engine} · {r.format}" for r in results]
        bars = axis.barh(names, rates, xerr=spans, color=colours, error_kw={"ecolor": "#343a40", "capsize": 3})
        axis.bar_label(bars, [f"{rate:.1f}" for rate in rates], padding=6)
        axis.margins(x=0.12)
        axis.set_title(f"batch {batch}, context {context}", loc="left", fontsize=11)
        axis.set_xlabel("tokens per second, decoding (bar: median; line: smallest to largest round)")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report.model.rpartition('/')[2]} on {report.machine}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _comparisons(results: list[Result]) -> list[str]:
    equal, any_ = comparisons(results)
    lines = [_line(equal, "the best peer of equal or better perplexity"), _line(any_, "the best peer in any format")]
    ours = any_.ours if any_ else next((r for r in results if r.engine == OURS.name), None)
    if ours and ours.floor_tokens_per_second and ours.tokens_per_second:
        lines.append(f"{ours.tokens_per_second / ours.floor_tokens_per_second:.0%} of the rate of the matrix products alone")
    return [f"{OURS.name}: {line}" for line in lines if line]


def _notes(report: Report) -> list[str]:
    """What the figures are, how each engine ran, who failed, who is absent."""
    scored = f"; ppl: perplexity over {report.perplexity_tokens} tokens" if report.perplexity_tokens else ""
    lines = [
        f"{report.machine}. tok/s: decoding, all sequences, median of {report.rounds} rounds; spread: smallest to largest; "
        f"context: the prompt's tokens; memory: largest resident set while generating{scored}"
    ]
    ran = {(r.engine, r.format): r for r in report.results if not r.error}
    lines += [f"{r.engine} {r.format}: version {r.version}, {r.threads} threads{r.detail and f', {r.detail}'}" for r in ran.values()]
    lines += [f"{r.engine} {r.format}, batch {r.batch}, context {r.context} failed: {r.error}" for r in report.results if r.error]
    return lines + [f"{absent.engine} is absent; to get it: {absent.how_to_get}" for absent in report.absent]


def _line(comparison: Comparison | None, whom: str) -> str:
    if comparison is None:
        return ""
    return f"{comparison.ratio:.2f} × {whom} ({comparison.peer.engine} {comparison.peer.format})"


def _cells(result: Result, best: Result | None) -> list[str]:
    rate = result.tokens_per_second
    if rate is None:
        return [result.engine, result.format, "failed", *["–"] * (len(_COLUMNS) - 3)]
    spread = ((result.tokens_per_second_high or 0) - (result.tokens_per_second_low or 0)) / rate
    return [
        result.engine,
        result.format,
        f"{rate:.1f}",
        f"{spread:.0%}",
        f"{rate / best.tokens_per_second:.2f} ×" if best and best.tokens_per_second else "–",
        f"{(result.time_to_first_token or 0) * 1000:.0f} ms",
        f"{(result.time_per_output_token or 0) * 1000:.2f} ms",
        f"{(result.peak_memory or 0) / 2**20:.0f} MiB",
        "–" if result.perplexity is None else f"{result.perplexity:.2f}",
    ]
