"""From one row of logits to one token: penalties, truncation, and random numbers keyed by seed, sample and position."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from decodefleet_agent.messages import Sampling, TokenLogprob

log = logging.getLogger(__name__)


class Draw(Protocol):
    """What decides the token of a row of logits."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        ...

    @property
    def prompt_length(self) -> int: ...


NOT_FINITE = "the model's logits are not finite for this input"


def sample_rows(logits: np.ndarray, draws: Sequence[Draw]) -> list[int | str]:
    """The token of each row, or why there is none. `logits`: [rows, vocabulary] fp32. A backend may do it natively."""
    return [_guarded(row, draw) for row, draw in zip(logits, draws, strict=True)]


def _guarded(logits: np.ndarray, draw: Draw) -> int | str:
    """One request's sampling must not end the engine, and with it all the others."""
    if not np.isfinite(logits).all():
        return NOT_FINITE
    try:
        return sample(logits, draw.sampling, draw.tokens[: draw.prompt_length], draw.tokens[draw.prompt_length :])
    except Exception as failure:
        log.exception("a row could not be sampled")
        return f"sampling failed: {type(failure).__name__}: {failure}"


def penalises(sampling: Sampling) -> bool:
    """Whether a token depends on the earlier ones beyond their logits."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its key: Philox4x64-10, key (seed, sample_index), counter (position, 0, 0, 0)."""
    key, counter = np.array([seed, sample_index], np.uint64), np.array([position, 0, 0, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def sample(logits: np.ndarray, sampling: Sampling, prompt_ids: list[int], output_ids: list[int]) -> int:
    """The token that follows prompt and output. `logits`: [vocabulary] fp32, finite, not changed.

    Order: repetition penalty, presence and frequency penalties, temperature, top-k, top-p, min-p. Temperature 0 takes the
    likeliest token, the lowest id among equals.
    """
    # In fp64: the smallest penalty and temperature that a request may ask for make numbers that fp32 does not hold.
    wide = _penalised(logits.astype(np.float64), sampling, prompt_ids, output_ids)
    if sampling.temperature == 0:
        return int(np.argmax(wide))
    token_ids, probabilities = _truncated(wide / sampling.temperature, sampling)
    cumulative = np.cumsum(probabilities)
    draw = uniform(sampling.seed, sampling.sample_index, len(prompt_ids) + len(output_ids)) * cumulative[-1]
    return int(token_ids[min(int(np.searchsorted(cumulative, draw, side="right")), len(token_ids) - 1)])


def token_logprob(logits: np.ndarray, token_id: int, alternatives: int) -> TokenLogprob:
    """Log-probabilities of the model itself, before penalties and temperature, in nats."""
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    top: Iterable[int] = []
    if alternatives:
        likely = np.flatnonzero(wide >= np.partition(wide, -min(alternatives, len(wide)))[-min(alternatives, len(wide))])
        top = likely[np.argsort(-wide[likely], kind="stable")][:alternatives]
    return TokenLogprob(token_id, float(logprobs[token_id]), [(int(token), float(logprobs[token])) for token in top])


def _penalised(logits: np.ndarray, sampling: Sampling, prompt_ids: list[int], output_ids: list[int]) -> np.ndarray:
    """Changes `logits`, fp64, and returns them."""
    if not penalises(sampling):
        return logits
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.asarray(prompt_ids + output_ids, np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if output_ids:
        tokens, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
        logits[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return logits


def _truncated(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Candidates, likeliest first, and their weights (not normalised)."""
    token_ids = np.arange(len(logits))
    if sampling.top_k or sampling.top_p < 1:
        keep = min(sampling.top_k or len(logits), len(logits))
        if keep < len(logits):
            # Every token that ties with the k-th is a candidate until the stable sort below decides.
            token_ids = np.flatnonzero(logits >= np.partition(logits, -keep)[-keep])
        token_ids = token_ids[np.argsort(-logits[token_ids], kind="stable")][:keep]
    weights = np.exp(logits[token_ids] - logits.max())
    if sampling.top_p < 1:
        cumulative = np.cumsum(weights)
        count = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        token_ids, weights = token_ids[:count], weights[:count]
    if sampling.min_p > 0:
        likely = weights >= sampling.min_p
        token_ids, weights = token_ids[likely], weights[likely]
    return token_ids, weights
