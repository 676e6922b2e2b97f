"""How much of a prompt one step computes: whole, so many tokens, by a formula of its length, or by what the neighbours can bear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from decodefleet_agent.engine.step_cost import chunk_pairs

if TYPE_CHECKING:
    from decodefleet_agent.engine.controllers.base import Situation

Chunk = int | Literal["Dynamic", "Formula"] | None  # None: whole prompts

WHOLE_BELOW = 512  # prompts shorter than this are never cut
UNMEASURED = 256  # tokens beside decoding rows as long as nothing is known of their cost
STEP_SHARE = 0.9  # of the objective: what a planned step may take of it, the rest is for what the cost does not know
PATIENCE = 1.33  # how much later than in one piece a prompt may get its first token for its neighbours' sake

_TILE = 16  # rows that backends compute together: smaller chunks cost more for each token
# Two candidates to an octave, since a step's policy has no time for more; the smallest only where an objective leaves no more.
_SIZES = sorted({4, 8, _TILE, *(base << power for base in (32, 48) for power in range(13))})


def dynamic_chunk_scheduler(sequence_length: int, gpu_cores: int) -> int:
    """Tokens of a chunk for a prompt of that length on that many cores, at least 1. Raises ValueError for what is not positive.

    The formula is the published one, int(max(1, n // (cores * 2)) * min(1.5, cores / 4)). The example beside it says 48 for
    (1024, 8), where the formula gives 96.
    """
    if sequence_length < 1 or gpu_cores < 1:
        raise ValueError(f"sequence_length and gpu_cores must be at least 1, not {sequence_length} and {gpu_cores}")
    return max(1, int(max(1, sequence_length // (gpu_cores * 2)) * min(1.5, gpu_cores / 4)))


def cut(chunk: Chunk, length: int, remaining: int, room: int, cores: int, whole_below: int) -> int:
    """Tokens of one prompt that a step computes, 1 … `remaining`. `room`: what the step still wants of prompts; only Dynamic fills it."""
    if chunk is None or length < whole_below:
        return remaining
    if chunk == "Dynamic":
        size = room
    elif chunk == "Formula":
        size = dynamic_chunk_scheduler(length, cores)
    else:
        size = chunk
    return max(1, min(size, remaining))


def prefill_room(situation: Situation) -> int:
    """Prompt tokens that the next step may hold so that the sequences that decode keep their pace.

    With an objective for the time per token: as many as the step's time allows. Without: the fewest with which the prompt
    gets its first token not much later than in one piece, or in time for its own objective if that is sooner.
    """
    limits, work, targets, cost = situation.limits, situation.work, situation.targets, situation.cost
    most = limits.max_batch_tokens
    if not work.decodes or not situation.prompt_remaining:
        return most
    if situation.burst and targets.time_per_output_token is None:
        return most
    if cost is None:
        return min(UNMEASURED, most)
    sizes = [*(size for size in _SIZES if size < most), most]
    if targets.time_per_output_token is not None:
        allowed = STEP_SHARE * targets.time_per_output_token
        fitting = [n for n in sizes if cost.seconds(work.chunk(situation.prompt_start, n)) <= allowed]
        return max(fitting, default=sizes[0])
    remaining, plain = situation.prompt_remaining, cost.plain(work.decodes, work.context)

    def seconds_in(size: int) -> float:
        """Until the prompt's rows are computed in such chunks. Its attention is left out: it is the same for every size."""
        size = min(size, remaining)
        return remaining / size * (plain + cost.added(size, 0))

    whole = seconds_in(remaining)
    limit = PATIENCE * whole
    if targets.time_to_first_token is not None:
        attention = cost.added(0, chunk_pairs(situation.prompt_start, remaining))
        left = STEP_SHARE * targets.time_to_first_token - situation.prompt_waited - attention
        limit = min(limit, left) if whole <= left else limit  # what is lost already must not cost the neighbours more
    return next((size for size in sizes if size >= _TILE and seconds_in(size) <= limit), most)
