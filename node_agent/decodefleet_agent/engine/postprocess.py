"""After a step: sample each row that asked for it, decide who is finished, and say what is new."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.sampling import sample, token_logprob
from decodefleet_agent.engine.scheduler import Scheduler
from decodefleet_agent.engine.sequence import Sequence
from decodefleet_agent.messages import Output

log = logging.getLogger(__name__)


def postprocess(
    batch: Batch, logits: np.ndarray, sequences: Mapping[int, Sequence], scheduler: Scheduler, context_length: int
) -> list[Output]:
    """Advances every sequence of the batch. `logits`: [spans that sample, vocabulary] fp32. Finished sequences have left the scheduler."""
    outputs = []
    rows = iter(logits)
    for span in batch.spans:
        sequence = sequences[span.sequence_id]
        scheduler.advance(sequence, span.length)
        if span.samples:
            outputs.append(_guarded_output(sequence, next(rows), context_length))
            if outputs[-1].finish == "error":
                scheduler.cancel(sequence)
            elif outputs[-1].finish:
                scheduler.finish(sequence)
    return outputs


def finish_reason(sequence: Sequence, context_length: int) -> str | None:
    """Why a sequence generates no further token, or None. A stop token is the last of its tokens."""
    output_length = len(sequence.tokens) - sequence.prompt_length
    if output_length and sequence.tokens[-1] in sequence.sampling.stop_token_ids:
        return "stop"
    if output_length >= sequence.sampling.max_tokens or len(sequence.tokens) >= context_length:
        return "length"
    return None


def _guarded_output(sequence: Sequence, logits: np.ndarray, context_length: int) -> Output:
    """One request's sampling must not end the engine, and with it all the others."""
    try:
        return _output(sequence, logits, context_length)
    except Exception as failure:
        log.exception("sequence %d could not be sampled", sequence.sequence_id)
        return Output(sequence.sequence_id, [], finish="error", error=f"sampling failed: {type(failure).__name__}: {failure}")


def _output(sequence: Sequence, logits: np.ndarray, context_length: int) -> Output:
    if not np.isfinite(logits).all():
        return Output(sequence.sequence_id, [], finish="error", error="the model's logits are not finite for this input")
    sampling = sequence.sampling
    prompt_ids, output_ids = sequence.tokens[: sequence.prompt_length], sequence.output_ids
    token = sample(logits, sampling, prompt_ids, output_ids)
    sequence.tokens.append(token)
    first = not sequence.answered
    sequence.answered = True
    return Output(
        sequence.sequence_id,
        [token],
        logprobs=[] if sampling.logprobs is None else [token_logprob(logits, token, sampling.logprobs)],
        finish=finish_reason(sequence, context_length),
        cached_prompt_tokens=sequence.cached_prompt_tokens if first else None,
        scheduled_at=sequence.scheduled_at if first else None,
    )
