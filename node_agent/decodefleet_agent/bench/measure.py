"""Runs engines on the same prompts, interleaved: in every round each engine has its turn, in an order that rotates."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from decodefleet_agent.bench import text
from decodefleet_agent.bench.catalog import OURS, Installed, PeerInfo, find
from decodefleet_agent.bench.process import EngineError, EngineProcess
from decodefleet_agent.bench.protocol import Load, Timing
from decodefleet_agent.bench.report import Absent, Report, Result, machine, measured
from decodefleet_agent.bench.statistics import perplexity, spread

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 32, 4
_CALIBRATION = (32, 16)  # prompt and new tokens of the run that chooses the number of threads

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """`shipped`: the number format of the model's file; `peers` with the format that each runs; `points` are (batch, context).

    `threads` None tries several and keeps the best.
    """

    uri: str
    path: Path
    shipped: str
    peers: list[tuple[PeerInfo, str]]
    points: list[tuple[int, int]]
    new_tokens: int
    rounds: int
    threads: int | None
    perplexity_tokens: int
    model_context: int
    environments: Path | None = None


@dataclass(frozen=True)
class Contender:
    """An engine in one format. `result` is what all its results begin as."""

    installed: Installed
    format: str
    result: Result

    @property
    def title(self) -> str:
        return f"{self.installed.peer.name} {self.format}"


def run(settings: Settings, tokens: list[int], tell: Tell) -> Report:
    """All points of all engines. `tokens` is the text; `tell` hears what is being done. An engine that fails is reported, not raised."""
    contenders, absent = _contenders(settings)
    for one in absent:
        tell(f"{one.engine} is absent; to get it: {one.how_to_get}")
    contenders = [_prepared(contender, settings, tokens, tell) for contender in contenders]
    results: list[Result] = []
    for batch, context in settings.points:
        results += _point(settings, contenders, tokens, batch, context, tell)
    return Report(settings.uri, machine(), settings.rounds, settings.perplexity_tokens, tuple(results), tuple(absent))


def prompt_length(context: int, new_tokens: int, model_context: int) -> int:
    """Tokens of the prompt at a context, which leaves the new ones room in the model's own. Raises ValueError if that is none."""
    length = min(context, model_context - new_tokens)
    if length < 1:
        raise ValueError(f"--tokens {new_tokens} leaves no room for a prompt in the model's context of {model_context} tokens")
    return length


def tokens_needed(settings: Settings) -> int:
    """How long the text must be at least."""
    return max(settings.perplexity_tokens, *(context + 8 for _, context in settings.points))


def _contenders(settings: Settings) -> tuple[list[Contender], list[Absent]]:
    contenders, absent = [], []
    for peer, form in [(OURS, OURS.formats[0]), *settings.peers]:
        if peer.gguf_only and settings.path.is_dir():
            missing = Absent(peer.name, "give --model a GGUF file, the only kind it reads")
        elif installed := find(peer, settings.environments):
            contenders.append(Contender(installed, form, Result(peer.name, "", form, "", settings.threads or 0, 0, 0, settings.new_tokens)))
            continue
        else:
            missing = Absent(peer.name, peer.how_to_get)
        if missing not in absent:
            absent.append(missing)
    return contenders, absent


def _prepared(contender: Contender, settings: Settings, tokens: list[int], tell: Tell) -> Contender:
    """With its best number of threads and its perplexity; with its error where it cannot even start."""
    try:
        threads = settings.threads or _best_threads(contender, settings, tokens, tell)
        contender = replace(contender, result=replace(contender.result, threads=threads))
        if settings.perplexity_tokens:
            tell(f"{contender.title}: perplexity over {settings.perplexity_tokens} tokens")
            with EngineProcess(contender.installed, _load(contender, settings, text.WINDOWS_TOGETHER, _window(settings))) as engine:
                score = _perplexity(engine, text.windows(tokens, settings.perplexity_tokens, _window(settings)))
            contender = replace(contender, result=replace(contender.result, perplexity=score))
    except EngineError as error:
        tell(f"{contender.title}: {error}")
        return replace(contender, result=replace(contender.result, error=str(error)))
    return contender


def _best_threads(contender: Contender, settings: Settings, tokens: list[int], tell: Tell) -> int:
    cores = len(os.sched_getaffinity(0))
    candidates = sorted({cores, max(1, cores // 2)})
    if len(candidates) == 1:
        return cores
    length, new = _CALIBRATION
    rates = {}
    for threads in candidates:
        trial = replace(contender, result=replace(contender.result, threads=threads))
        with EngineProcess(trial.installed, _load(trial, settings, 1, length + new)) as engine:
            prompts = text.prompts(tokens, 2, length, 0)
            engine.generate(prompts[:1], new)
            timing, _ = engine.generate(prompts[1:], new)
        rates[threads] = timing.rate
        tell(f"{contender.title}: {rates[threads]:.1f} tokens/s on {threads} threads")
    return max(rates, key=lambda threads: rates[threads])


def _window(settings: Settings) -> int:
    return min(text.WINDOW, settings.model_context)


def _perplexity(engine: EngineProcess, windows: list[text.Window]) -> float | None:
    scores: list[float] = []
    for start in range(0, len(windows), text.WINDOWS_TOGETHER):
        part = windows[start : start + text.WINDOWS_TOGETHER]
        answer = engine.logprobs([window.tokens for window in part])
        if answer is None:
            return None
        for window, logprobs in zip(part, answer, strict=True):
            scores += logprobs[window.scored - 1 :]
    return perplexity(scores)


def _point(settings: Settings, contenders: list[Contender], tokens: list[int], batch: int, context: int, tell: Tell) -> list[Result]:
    """All engines at one batch and context, side by side: idle ones wait on a pipe."""
    length = prompt_length(context, settings.new_tokens, settings.model_context)
    results = {c.title: replace(c.result, batch=batch, context=length) for c in contenders}
    timings: dict[str, list[tuple[Timing, int]]] = {c.title: [] for c in contenders}
    running: list[tuple[str, EngineProcess]] = []

    def fail(title: str, error: Exception) -> None:
        tell(f"{title}: {error}")
        results[title] = replace(results[title], error=str(error))

    with contextlib.ExitStack() as stack:
        for contender in contenders:
            title = contender.title
            if contender.result.error:
                continue
            tell(f"batch {batch}, context {length}: loading {title}")
            try:
                load = _load(contender, settings, batch, length + settings.new_tokens)
                engine = stack.enter_context(EngineProcess(contender.installed, load))
                loaded = engine.loaded
                results[title] = replace(results[title], version=loaded.version, format=loaded.format, detail=loaded.detail)
                engine.generate([prompt[:_WARM_UP_PROMPT] for prompt in text.prompts(tokens, batch, length, 0)], _WARM_UP_TOKENS)
                floor = engine.floor(batch)
                results[title] = replace(results[title], floor_tokens_per_second=batch / floor if floor else None)
                running.append((title, engine))
            except EngineError as error:
                fail(title, error)
        for number in range(settings.rounds):
            prompts = text.prompts(tokens, batch, length, (number + 1) * batch)
            for title, engine in _rotated(running, number):
                try:
                    timing, peak = engine.generate(prompts, settings.new_tokens)
                    rate = timing.rate
                except (EngineError, ValueError) as error:
                    fail(title, error)
                    running = [one for one in running if one[0] != title]
                    continue
                timings[title].append((timing, peak))
                tell(f"batch {batch}, context {length}, round {number + 1}: {title} {rate:.1f} tokens/s")
    return [_summary(result, timings[title]) for title, result in results.items()]


def _rotated(running: list[tuple[str, EngineProcess]], by: int) -> list[tuple[str, EngineProcess]]:
    by %= max(1, len(running))
    return running[by:] + running[:by]


def _summary(result: Result, rounds: list[tuple[Timing, int]]) -> Result:
    if result.error or not rounds:
        return result
    return measured(
        result,
        spread([timing.rate for timing, _ in rounds]),
        spread([timing.first for timing, _ in rounds]),
        spread([result.batch / timing.rate for timing, _ in rounds]),
        max(peak for _, peak in rounds),
    )


def _load(contender: Contender, settings: Settings, batch: int, context: int) -> Load:
    return Load(
        uri=settings.uri,
        path=str(settings.path),
        shipped=settings.shipped,
        format=contender.format,
        threads=contender.result.threads,
        batch=batch,
        context=context,
    )
