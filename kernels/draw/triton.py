"""advance_drawn in Triton: each row by several programs, which pass over it a few times.

1. best: the best logit, and bounds of scores. The last program of a row finishes it, or sets up its search.
2. narrow, three times: weights (tokens for top-k, mass for top-p) above 16 bounds; the last program of a row takes the
   two bounds between which the filter's edge lies. Weights are float32 here; nothing hangs on them.
3. collect: what is above both bounds exactly (float64), bounds of its scores, and a list of the tokens between.
4. decide: a program a row finds the edge in the list and lets those that it keeps run against the others' winner.
Rows whose edge isn't between the bounds after all, or has more than LISTED tokens beside it, are decided by `slow`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.draw import BOUNDS, CHUNK, LISTED, MARKS
from flowinfer.kernels.draw.race import NOBODY, key_halves, lead, race
from flowinfer.kernels.draw.slow import least_kept, mass_edge, ordered, value_of

PART, WARPS = 256, 4  # tokens that a program of `narrow` weighs at a time
REGISTERS = 64  # a thread of `best` and `collect`, so that a multiprocessor holds four programs and not one or two

DONE, TOP_K, TOP_P, BOTH, MIN_P = (tl.constexpr(n) for n in range(5))  # what is still to be done with a row
SPAN = tl.constexpr(
    64.0
)  # noise spans 49: a token this far below the best can't win, nor does its mass show in float64
LEAST = tl.constexpr(-3.4028234663852886e38)  # of all finite numbers
ROW = tl.constexpr(MARKS)
PEAK, FLOOR, LOW, HIGH, WANTED, ABOVE = (tl.constexpr(n) for n in range(MARKS))  # a row's marks


def launch(logits, slots, last, lengths, chosen, settings, scratch):
    """Arguments as checked by advance_drawn."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    grid, merged = (chunks, rows), triton.next_power_of_2(chunks)
    where = (logits, slots, last, lengths, chosen, *settings)
    search = (scratch.modes, scratch.settled, scratch.marks)
    _best[grid](
        *where, *search, scratch.arrived, scratch.found, scratch.tops, scratch.firsts, scratch.leads,
        vocab, chunks, BLOCK=CHUNK, CHUNKS=merged, num_warps=8, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    for turn in range(3):
        _narrow[grid](
            logits, slots, settings.temperature, *search, scratch.arrived, scratch.weights,
            vocab, chunks, BLOCK=CHUNK, PART=PART, J=BOUNDS, CHUNKS=merged, LISTED=LISTED, FIRST=turn == 0,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    lists = (scratch.found, scratch.listed, scratch.sums, scratch.leads)
    _collect[grid](
        logits, slots, lengths, settings.temperature, settings.seeds, *search, *lists, vocab, chunks,
        BLOCK=CHUNK, LISTED=LISTED, num_warps=8, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    _decide[(rows,)](
        *where, *search, *lists, vocab, chunks, BLOCK=CHUNK, CHUNKS=merged, LISTED=LISTED,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _scaled(row, i, vocab, factor):
    """0 has one sign."""
    x = tl.load(row + i, mask=i < vocab, other=float("-inf")).to(tl.float32) * factor
    return tl.where(x == 0, 0.0, x)


@triton.jit
def _factor(temperatures, slot):
    return tl.div_rn(1.0, tl.load(temperatures + slot))


@triton.jit
def _advance(b, slot, token, last, lengths, chosen):
    tl.store(chosen + b, token)
    tl.store(last + slot, tl.maximum(token, 0))
    tl.store(lengths + slot, tl.load(lengths + slot) + 1)


@triton.jit
def _race_of_chunks(row, c, leads, vocab, factor, least, low, high, BLOCK: tl.constexpr):
    """As `race`, over the tokens at or above `least` of all chunks: only those are read that may have the winner."""
    winner = tl.full([], float("-inf"), tl.float64)
    chosen = tl.full([], NOBODY, tl.int32)
    ahead = tl.max(leads, 0)
    while (ahead >= winner) & (ahead > float("-inf")):
        chunk = tl.min(tl.where(leads == ahead, c, NOBODY), 0)
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(row, i, vocab, factor)
        score, token = race(row, i, x, (x >= least) & (x < float("inf")), factor, low, high)
        better = (score > winner) | ((score == winner) & (token < chosen))
        chosen = tl.where(better, token, chosen)
        winner = tl.where(better, score, winner)
        leads = tl.where(c == chunk, float("-inf"), leads)
        ahead = tl.max(leads, 0)
    return winner, chosen


@triton.jit
def _best(
    logits, slots, last, lengths, chosen, temperatures, top_ks, top_ps, min_ps, seeds, modes, settled, marks,
    arrived, found, tops, firsts, leads, vocab, chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b)
    if slot < 0:
        tl.store(chosen + b, -1, mask=chunk == 0)
        return
    row = logits + b.to(tl.int64) * vocab
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a NaN must come out on top, as it does in torch
    top = tl.max(x, 0)
    part = b * chunks + chunk
    tl.store(tops + part, top)
    tl.store(firsts + part, tl.min(tl.where(x == top, i, NOBODY), 0))
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    by_k = (top_k > 0) & (top_k < vocab)
    filtered = by_k | (top_p < 1) | (min_p > 0)
    if (temperature > 0) & (filtered == 0):
        factor = tl.div_rn(1.0, temperature)
        low, high = key_halves(tl.load(seeds + slot), tl.load(lengths + slot))
        x *= factor
        runs = (x > float("-inf")) & (x < float("inf"))
        tl.store(leads + part, lead(i, x, runs, top * factor, low, high))
    tl.debug_barrier()
    before = tl.atomic_add(arrived + b, 1, sem="acq_rel", scope="gpu")
    if before == chunks - 1:
        tl.store(arrived + b, 0)
        c = tl.arange(0, CHUNKS)
        live = c < chunks
        parts = b * chunks + c
        bests = tl.load(tops + parts, mask=live, other=float("-inf"), cache_modifier=".cg")
        first = tl.load(firsts + parts, mask=live, other=NOBODY, cache_modifier=".cg")
        best = tl.max(bests, 0)
        token = tl.min(tl.where(bests == best, first, NOBODY), 0)
        finite = (best > float("-inf")) & (best < float("inf"))
        mode = tl.where(by_k, tl.where(top_p < 1, BOTH, TOP_K), tl.where(top_p < 1, TOP_P, MIN_P))
        peak = best * tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))
        peak = tl.where(peak == 0, 0.0, peak)
        warm = (temperature > 0) & (tl.abs(peak) < float("inf"))
        mode = tl.where(finite & warm & filtered, mode, DONE)
        tl.store(modes + b, mode)
        if mode == DONE:
            if finite & warm:
                each = tl.load(leads + parts, mask=live, other=float("-inf"), cache_modifier=".cg")
                factor = tl.div_rn(1.0, temperature)
                low, high = key_halves(tl.load(seeds + slot), tl.load(lengths + slot))
                _, token = _race_of_chunks(row, c, each, vocab, factor, LEAST, low, high, BLOCK)
            _advance(b, slot, tl.where(finite, token, -1), last, lengths, chosen)
        else:
            floor = tl.where(min_p > 0, peak + tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
            floor = tl.maximum(floor, peak - SPAN)
            tl.store(found + b, 0)
            tl.store(settled + b, (mode == MIN_P).to(tl.int32))
            at = marks + b * ROW
            tl.store(at + PEAK, peak)
            tl.store(at + FLOOR, floor)
            tl.store(at + LOW, floor)
            ceiling = peak + tl.maximum(tl.abs(peak) * 1e-6, 1.0)
            tl.store(at + HIGH, tl.where(mode == MIN_P, floor, ceiling))
            tl.store(at + WANTED, tl.where(by_k, top_k.to(tl.float32), top_p))
            tl.store(at + ABOVE, 0.0)


@triton.jit
def _narrow(
    logits, slots, temperatures, modes, settled, marks, arrived, weights, vocab, chunks,
    BLOCK: tl.constexpr, PART: tl.constexpr, J: tl.constexpr, CHUNKS: tl.constexpr, LISTED: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b)
    if slot < 0:
        return
    mode = tl.load(modes + b)
    if (mode == DONE) | (tl.load(settled + b) != 0):
        return
    at = marks + b * ROW
    peak = tl.load(at + PEAK)
    floor = tl.load(at + FLOOR)
    low = tl.load(at + LOW)
    high = tl.load(at + HIGH)
    row = logits + b.to(tl.int64) * vocab
    factor = _factor(temperatures, slot)
    j = tl.arange(0, J)
    if FIRST:  # closer together near the best logit, where mass is
        bounds = tl.where(j < J - 1, peak - (peak - floor) * tl.exp2((j - (J - 1)).to(tl.float32) * 0.75), floor)
    else:
        bounds = low + (high - low) * ((J - 1 - j).to(tl.float32) / J)
    sums = tl.zeros([J, PART], tl.float32)
    for start in range(chunk * BLOCK, chunk * BLOCK + BLOCK, PART):
        x = _scaled(row, start + tl.arange(0, PART), vocab, factor)
        weight = tl.where(mode == TOP_P, tl.exp(x - peak), 1.0)
        weight = tl.where(x >= floor, weight, 0.0)
        sums += tl.where(x[None, :] >= bounds[:, None], weight[None, :], 0.0)
    tl.store(weights + (b * chunks + chunk) * J + j, tl.sum(sums, 1))
    tl.debug_barrier()
    before = tl.atomic_add(arrived + b, 1, sem="acq_rel", scope="gpu")
    if before == chunks - 1:
        tl.store(arrived + b, 0)
        c = tl.arange(0, CHUNKS)
        parts = weights + (b * chunks + c[:, None]) * J + j[None, :]
        total = tl.sum(tl.load(parts, mask=c[:, None] < chunks, other=0.0, cache_modifier=".cg"), 0)
        wanted = tl.load(at + WANTED)
        if FIRST & (mode == TOP_P):
            wanted = tl.max(total, 0) * tl.maximum(wanted, 1e-30)
            tl.store(at + WANTED, wanted)
        reaches = total >= wanted
        none = tl.max(reaches.to(tl.int32), 0) == 0  # fewer than top_k tokens at or above the floor: all are kept
        above = tl.max(tl.where(reaches, tl.load(at + ABOVE), total), 0)
        most = tl.min(tl.where(reaches, total, float("inf")), 0)
        high = tl.where(none, floor, tl.min(tl.where(reaches, high, bounds), 0))
        low = tl.where(none, floor, tl.max(tl.where(reaches, bounds, float("-inf")), 0))
        tl.store(at + LOW, low)
        tl.store(at + HIGH, high)
        tl.store(at + ABOVE, above)
        least = tl.where(mode == TOP_P, tl.exp(low - peak), 1.0)  # no token between the bounds weighs less
        between = most * 1.000001 - tl.where(mode == BOTH, 0.0, above)
        tl.store(settled + b, (none | (between < least * (LISTED // 2))).to(tl.int32))


@triton.jit
def _collect(
    logits, slots, lengths, temperatures, seeds, modes, settled, marks, found, listed, sums, leads,
    vocab, chunks, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b)
    if slot < 0:
        return
    mode = tl.load(modes + b)
    if mode == DONE:
        return
    at = marks + b * ROW
    peak = tl.load(at + PEAK)
    row = logits + b.to(tl.int64) * vocab
    factor = _factor(temperatures, slot)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(row, i, vocab, factor)
    kept = x >= tl.load(at + FLOOR)
    sure = kept & (x >= tl.load(at + HIGH)) & (mode != BOTH)  # both: top-p is over what top-k leaves, all of it listed
    part = b * chunks + chunk
    above = tl.sum(sure.to(tl.int32), 0).to(tl.float64)
    total = tl.full([], 0.0, tl.float64)
    if mode == TOP_P:
        mass = tl.where(kept, tl.exp(x.to(tl.float64) - peak.to(tl.float64)), 0.0)
        total = tl.sum(mass, 0)
        above = tl.sum(tl.where(sure, mass, 0.0), 0)
    tl.store(sums + 2 * part, above)
    tl.store(sums + 2 * part + 1, total)
    bound = tl.full([], float("-inf"), tl.float64)
    if tl.max(sure.to(tl.int32), 0) > 0:
        low, high = key_halves(tl.load(seeds + slot), tl.load(lengths + slot))
        bound = lead(i, x, sure, peak, low, high)
    tl.store(leads + part, bound)
    maybe = kept & (x >= tl.load(at + LOW)) & (sure == 0)
    count = tl.sum(maybe.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(found + b, count) + tl.cumsum(maybe.to(tl.int32), 0) - 1
        tl.store(listed + b * LISTED + place, i, mask=maybe & (place < LISTED))


@triton.jit
def _decide(
    logits, slots, last, lengths, chosen, temperatures, top_ks, top_ps, min_ps, seeds, modes, settled, marks,
    found, listed, sums, leads, vocab, chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    if slot < 0:
        return
    mode = tl.load(modes + b)
    if mode == DONE:
        return
    at = marks + b * ROW
    peak = tl.load(at + PEAK)
    bottom = ordered(tl.load(at + LOW)).to(tl.int64)
    row = logits + b.to(tl.int64) * vocab
    factor = _factor(temperatures, slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    c = tl.arange(0, CHUNKS)
    part = b * chunks + c
    above = tl.sum(tl.load(sums + 2 * part, mask=c < chunks, other=0.0), 0)
    total = tl.sum(tl.load(sums + 2 * part + 1, mask=c < chunks, other=0.0), 0)
    each = tl.load(leads + part, mask=c < chunks, other=float("-inf"))
    low, high = key_halves(tl.load(seeds + slot), tl.load(lengths + slot))
    winner, token = _race_of_chunks(row, c, each, vocab, factor, tl.load(at + HIGH), low, high, BLOCK)
    count = tl.load(found + b)
    n = tl.arange(0, LISTED)
    kept = n < count
    i = tl.load(listed + b * LISTED + n, mask=kept, other=0)
    x = tl.where(kept, _scaled(row, i, vocab, factor), float("-inf"))
    key = ordered(x)
    top = tl.max(key, 0).to(tl.int64)
    fits = count <= LISTED
    if (mode == TOP_K) | (mode == BOTH):
        needed = top_k - above.to(tl.int32)
        least = bottom
        best = top
        while least < best:
            middle = (least + best + 1) >> 1
            reached = tl.sum((kept & (key >= middle.to(tl.int32))).to(tl.int32), 0) >= needed
            least = tl.where(reached, middle, least)
            best = tl.where(reached, best, middle - 1)
        kept = kept & (key >= least.to(tl.int32))
    if (mode == TOP_P) | (mode == BOTH):
        mass = tl.where(kept, tl.exp(x.to(tl.float64) - peak.to(tl.float64)), 0.0)
        if mode == BOTH:
            above = tl.full([], 0.0, tl.float64)
            total = tl.sum(mass, 0)
        wanted = total * tl.maximum(top_p, 1e-30)
        fits = fits & (above < wanted) & (above + tl.sum(mass, 0) >= wanted)
        least = bottom
        edge = top
        while least < edge:
            middle = (least + edge) >> 1
            enough = above + tl.sum(tl.where(key > middle.to(tl.int32), mass, 0.0), 0) < wanted
            edge = tl.where(enough, middle, edge)
            least = tl.where(enough, least, middle + 1)
        above += tl.sum(tl.where(key > edge.to(tl.int32), mass, 0.0), 0)
        one = tl.exp(value_of(edge).to(tl.float64) - peak.to(tl.float64))
        ties = tl.maximum(tl.ceil((wanted - above) / one), 1.0)
        tied = kept & (key == edge.to(tl.int32))
        least = tl.full([], 0, tl.int64)  # the lowest token up to which there are enough of them
        most = tl.full([], 0, tl.int64) + vocab - 1
        if tl.sum(tied.to(tl.int32), 0).to(tl.float64) > ties:
            while least < most:
                middle = (least + most) >> 1
                reached = tl.sum((tied & (i <= middle.to(tl.int32))).to(tl.int32), 0).to(tl.float64) >= ties
                most = tl.where(reached, middle, most)
                least = tl.where(reached, least, middle + 1)
        kept = (kept & (key > edge.to(tl.int32))) | (tied & (i <= most.to(tl.int32)))
    if fits:
        score, first = race(row, i, x, kept, factor, low, high)
        better = (score > winner) | ((score == winner) & (first < token))
        token = tl.where(better, first, token)
    else:
        token = _slow(row, vocab, factor, tl.load(at + FLOOR), peak, top_k, top_p, low, high, BLOCK)
    _advance(b, slot, token, last, lengths, chosen)


@triton.jit
def _slow(row, vocab, factor, floor, peak, top_k, top_p, low, high, BLOCK: tl.constexpr):
    """The token of a row by one program and up to a hundred passes, whatever its logits."""
    least = least_kept(row, vocab, factor, floor, top_k, BLOCK)
    edge, ties = mass_edge(row, vocab, factor, floor, least, peak, top_p, BLOCK)
    winner = tl.full([], float("-inf"), tl.float64)
    token = tl.full([], NOBODY, tl.int32)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = _scaled(row, i, vocab, factor)
        key = ordered(x).to(tl.int64)
        kept = (x >= floor) & (key >= least)
        tied = kept & (key == edge)
        rank = seen + tl.cumsum(tied.to(tl.int64), 0) - 1
        seen += tl.sum(tied.to(tl.int64), 0)
        kept = kept & ((key > edge) | (tied & (rank < ties)))
        score, first = race(row, i, x, kept, factor, low, high)
        token = tl.where(score > winner, first, token)
        winner = tl.maximum(winner, score)
    return token
