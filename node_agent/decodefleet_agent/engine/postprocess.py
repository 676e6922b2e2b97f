"""After a step: append the token of each row that was sampled, decide who is finished, and say what is new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.sampling import token_logprob
from decodefleet_agent.engine.scheduler import Scheduler
from decodefleet_agent.engine.sequence import Sequence
from decodefleet_agent.messages import Output


@dataclass(frozen=True)
class Fresh:
    """Outputs of a step. `rows`: logits [vocabulary] whose log-probabilities an output still lacks, and how many alternatives."""

    outputs: list[Output] = field(default_factory=list)
    rows: list[tuple[Output, np.ndarray, int]] = field(default_factory=list)

    def complete(self) -> list[Output]:
        """The outputs with their log-probabilities; apart from the step, because no later step depends on them."""
        for output, logits, alternatives in self.rows:
            output.logprobs.append(token_logprob(logits, output.token_ids[0], alternatives))
        return self.outputs


def postprocess(
    batch: Batch,
    logits: np.ndarray,
    tokens: list[int | str],
    sequences: Mapping[int, Sequence],
    scheduler: Scheduler,
    context_length: int,
) -> Fresh:
    """Advances every sequence of the batch. `logits`: [spans that sample, vocabulary] fp32, and their tokens, or why there is none.

    Finished sequences have left the scheduler.
    """
    fresh = Fresh()
    rows = iter(zip(logits, tokens, strict=True))
    for span in batch.spans:
        sequence = sequences[span.sequence_id]
        scheduler.advance(sequence, span.length)
        if not span.samples:
            continue
        row, token = next(rows)
        if isinstance(token, str):
            output = Output(sequence.sequence_id, [], finish="error", error=token)
            scheduler.cancel(sequence)
        else:
            output = _output(sequence, token, context_length)
            if (alternatives := sequence.sampling.logprobs) is not None:
                fresh.rows.append((output, row.copy(), alternatives))
            if output.finish:
                scheduler.finish(sequence)
        fresh.outputs.append(output)
    return fresh


def finish_reason(sequence: Sequence, context_length: int) -> str | None:
    """Why a sequence generates no further token, or None. A stop token is the last of its tokens."""
    output_length = len(sequence.tokens) - sequence.prompt_length
    if output_length and sequence.tokens[-1] in sequence.sampling.stop_token_ids:
        return "stop"
    if output_length >= sequence.sampling.max_tokens or len(sequence.tokens) >= context_length:
        return "length"
    return None


def _output(sequence: Sequence, token: int, context_length: int) -> Output:
    sequence.tokens.append(token)
    finish = finish_reason(sequence, context_length)
    if sequence.answered:
        return Output(sequence.sequence_id, [token], finish=finish)
    sequence.answered = True
    cached, scheduled_at = sequence.cached_prompt_tokens, sequence.scheduled_at
    return Output(sequence.sequence_id, [token], finish=finish, cached_prompt_tokens=cached, scheduled_at=scheduled_at)
