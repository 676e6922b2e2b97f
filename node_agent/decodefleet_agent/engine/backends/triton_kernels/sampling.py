"""From logits to tokens in one kernel: greedy, or temperature and top-k with the numbers of `engine.sampling.uniform`.

The token is that of `engine.sampling.sample`, but where a draw falls within fp64's rounding of the border between two tokens.
Candidates are not sorted: what is k-th, and on which one a draw falls, is found by bisection over the logits' order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _philox(low_key, high_key, counter):
    """First word of Philox4x64-10 for the counter (counter + 1, 0, 0, 0), which is where NumPy's generator starts; all uint64."""
    zero = counter ^ counter
    c0, c1, c2, c3 = counter + 1, zero, zero, zero
    first, second = zero + 0xD2E7470EE14C6C93, zero + 0xCA5A826395121157
    first_step, second_step = zero + 0x9E3779B97F4A7C15, zero + 0xBB67AE8584CAA73B
    for _ in range(10):
        high0, low0 = tl.umulhi(first, c0), first * c0
        high1, low1 = tl.umulhi(second, c2), second * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ low_key, low1, high0 ^ c3 ^ high_key, low0
        low_key, high_key = low_key + first_step, high_key + second_step
    return c0


@triton.jit
def _uniform(seed, sample_index, position):
    """As `engine.sampling.uniform`, from int64 with the bits of the unsigned key."""
    bits = _philox(seed.to(tl.uint64, bitcast=True), sample_index.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True))
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _keys(row, start, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Ids, logits and whole numbers of the same order (as equal as the logits: -0 counts as 0) of one block."""
    token = start + tl.arange(0, BLOCK)
    logits = tl.load(row + token, mask=token < VOCABULARY, other=float("-inf")) + 0.0
    bits = logits.to(tl.int32, bitcast=True)
    return token, logits, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _count_from(row, least, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens whose key is at least this."""
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCABULARY, BLOCK):
        token, _, key = _keys(row, start, VOCABULARY, BLOCK)
        count += ((key >= least) & (token < VOCABULARY)).to(tl.int64)
    return tl.sum(count, axis=0)


@triton.jit
def _weight_from(row, least, temperature, top, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Weights, together, of tokens whose key is at least this."""
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCABULARY, BLOCK):
        token, logits, key = _keys(row, start, VOCABULARY, BLOCK)
        chosen = (key >= least) & (token < VOCABULARY)
        weight += tl.where(chosen, tl.exp(logits.to(tl.float64) / temperature - top), 0.0)
    return tl.sum(weight, axis=0)


@triton.jit
def _nth(row, wanted, number, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the token that comes `number`th, from 0, in order of id, among those of this key."""
    before = number * 0
    found = number * 0
    for start in range(0, VOCABULARY, BLOCK):
        token, _, key = _keys(row, start, VOCABULARY, BLOCK)
        same = ((key == wanted) & (token < VOCABULARY)).to(tl.int64)
        rank = before + tl.cumsum(same, axis=0) - 1
        found += tl.sum(tl.where((same > 0) & (rank == number), token, 0).to(tl.int64), axis=0)
        before += tl.sum(same, axis=0)
    return found


@triton.jit
def _by_id(row, temperature, top, uniform, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The first token, in order of id, up to which the weights exceed the draw."""
    total = _weight_from(row, tl.full([], -0x80000000, tl.int64), temperature, top, VOCABULARY, BLOCK)
    draw = uniform * total
    before = total * 0
    token_id = tl.full([], VOCABULARY - 1, tl.int64)
    for start in range(0, VOCABULARY, BLOCK):
        token, logits, _ = _keys(row, start, VOCABULARY, BLOCK)
        weight = tl.where(token < VOCABULARY, tl.exp(logits.to(tl.float64) / temperature - top), 0.0)
        up_to = before + tl.cumsum(weight, axis=0)
        token_id = tl.minimum(token_id, tl.min(tl.where(up_to > draw, token, VOCABULARY - 1).to(tl.int64), axis=0))
        before += tl.sum(weight, axis=0)
    return token_id


@triton.jit
def _by_rank(row, temperature, top, top_k, uniform, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The first token, likeliest first and then in order of id, up to which the weights of the `top_k` likeliest exceed the draw."""
    low, high = tl.full([], -0x80000000, tl.int64), tl.full([], 0x7FFFFFFF, tl.int64)
    for _ in range(32):
        middle = low + ((high - low + 1) >> 1)
        enough = _count_from(row, middle, VOCABULARY, BLOCK) >= top_k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    least = low  # the key of the last candidate
    above = _weight_from(row, least + 1, temperature, top, VOCABULARY, BLOCK)
    with_ties = _weight_from(row, least, temperature, top, VOCABULARY, BLOCK)
    ties = _count_from(row, least, VOCABULARY, BLOCK) - _count_from(row, least + 1, VOCABULARY, BLOCK)
    kept = top_k - _count_from(row, least + 1, VOCABULARY, BLOCK)
    draw = uniform * (above + (with_ties - above) * kept.to(tl.float64) / ties.to(tl.float64))

    low, high = least, tl.full([], 0x7FFFFFFF, tl.int64)
    for _ in range(32):
        middle = low + ((high - low + 1) >> 1)
        enough = _weight_from(row, middle, temperature, top, VOCABULARY, BLOCK) > draw
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    before = _weight_from(row, low + 1, temperature, top, VOCABULARY, BLOCK)
    equals = _count_from(row, low, VOCABULARY, BLOCK) - _count_from(row, low + 1, VOCABULARY, BLOCK)
    each = (_weight_from(row, low, temperature, top, VOCABULARY, BLOCK) - before) / equals.to(tl.float64)
    number = tl.where(each > 0, (draw - before) / tl.where(each > 0, each, 1.0), 0.0).to(tl.int64)
    last = tl.where(low == least, kept, equals) - 1
    return _nth(row, low, tl.maximum(tl.minimum(number, last), 0), VOCABULARY, BLOCK)


@triton.jit
def _sample(
    logits, temperatures, top_ks, seeds, sample_indices, positions, out, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * VOCABULARY
    best = tl.full([], -0x80000000, tl.int64)
    highest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        _, values, key = _keys(row, start, VOCABULARY, BLOCK)
        best = tl.maximum(best, tl.max(key, axis=0))
        highest = tl.maximum(highest, tl.max(values, axis=0))
    temperature = tl.load(temperatures + number)
    if temperature > 0:
        top = highest.to(tl.float64) / temperature
        uniform = _uniform(tl.load(seeds + number), tl.load(sample_indices + number), tl.load(positions + number))
        top_k = tl.load(top_ks + number)
        if top_k > 0:
            token = _by_rank(row, temperature, top, tl.minimum(top_k, VOCABULARY), uniform, VOCABULARY, BLOCK)
        else:
            token = _by_id(row, temperature, top, uniform, VOCABULARY, BLOCK)
    else:
        token = _nth(row, best, tl.full([], 0, tl.int64), VOCABULARY, BLOCK)
    tl.store(out + number, token)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeds: torch.Tensor,
    sample_indices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The token that follows each row: [rows] int64.

    `logits` [rows, vocabulary] fp32, finite. Of each row: `temperatures` fp64 (0: the likeliest, the lowest id among equals); `top_ks`
    int64 (0: all); `seeds`, `sample_indices` and `positions` int64, those above 2**63 - 1 as their bits.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        _sample[(rows,)](logits, temperatures, top_ks, seeds, sample_indices, positions, out, vocabulary, block, num_warps=8)
    return out
