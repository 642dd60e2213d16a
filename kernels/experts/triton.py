"""The expert layer in Triton. Grids depend on T alone, so that all of it can be captured in a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels import tuned


def launch_route(logits, ids, weights, norm_topk):
    """Arguments as checked by route."""
    rows, num = logits.shape
    _route[(rows,)](
        logits, ids, weights, num, TOP=ids.shape[1], BT=triton.next_power_of_2(ids.shape[1]),
        BLOCK=triton.next_power_of_2(num), NORM=norm_topk, num_warps=1,
    )  # fmt: skip


def launch_bucket(ids, pairs, counts):
    """Arguments as checked by bucket."""
    num_pairs = ids.numel()
    block = min(4096, triton.next_power_of_2(num_pairs))
    _bucket[(counts.shape[0],)](ids, pairs, counts, num_pairs, BLOCK=block, num_warps=4 if block > 256 else 1)


def launch_gated(x, gate_up, routing, norm, eps, out, fixed=False, limit=0.0):
    """Arguments as checked by gather_gated."""
    num_experts, width, hidden = gate_up.shape
    block_m, block_n, block_k, warps, stages = (
        fixed_tiles(hidden, x.element_size()) if fixed
        else _tiles(out.shape[0], num_experts, hidden, x.element_size(), gated=True)
    )  # fmt: skip
    grid = _most_blocks(out.shape[0], num_experts, block_m), triton.cdiv(width // 2, block_n)
    _gated[grid](
        x, gate_up, norm, routing.pairs, routing.counts, out, out.shape[0], width // 2, hidden, num_experts, eps, limit,
        TOP=routing.experts.shape[1], BE=triton.next_power_of_2(num_experts), BM=block_m, BN=block_n, BK=block_k,
        LIMIT=limit != 0, NORM=norm is not None, EVEN=hidden % block_k == 0 and width // 2 % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_down(h, down, routing, out, fixed=False):
    """Arguments as checked by combine."""
    num_experts, hidden, width = down.shape
    block_m, block_n, block_k, warps, stages = (
        fixed_tiles(width, h.element_size()) if fixed
        else _tiles(h.shape[0], num_experts, width, h.element_size(), gated=False)
    )  # fmt: skip
    grid = _most_blocks(h.shape[0], num_experts, block_m), triton.cdiv(hidden, block_n)
    _down[grid](
        h, down, routing.weights, routing.pairs, routing.counts, out, h.shape[0], hidden, width, num_experts,
        BE=triton.next_power_of_2(num_experts), BM=block_m, BN=block_n, BK=block_k,
        EVEN=width % block_k == 0 and hidden % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_sum(y, sorted_by, residual, top):
    """residual += sum over each token's `top` rows of y; sorted_by: (place of each pair in y, weights) where needed."""
    rows, hidden = residual.shape
    block = min(1024, triton.next_power_of_2(hidden))
    place, weights = sorted_by if sorted_by is not None else (None, None)
    _sum[(rows, triton.cdiv(hidden, block))](
        y, place, weights, residual, hidden, TOP=top, BLOCK=block, SORTED=sorted_by is not None, num_warps=4
    )


def _most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Row blocks that num_pairs pairs can need at most, however they fall on the experts."""
    return min(num_pairs, num_experts + num_pairs // block_m)


def _tiles(num_pairs: int, num_experts: int, size_in: int, element_size: int, *, gated: bool):
    """Rows of a tile by the rows that an expert gets on average; the weight tile keeps its size."""
    mean = num_pairs / num_experts
    steps = tuned.read("experts", tuned.card()).get(f"{'gated' if gated else 'down'} {num_experts} x {size_in}")
    if steps and element_size == 2:
        return tuned.nearest(steps, mean)
    if element_size == 4:
        return 16 if mean <= 12 else 32, 32, 32, 4, 2
    if mean <= 12:
        return 16, 32 if gated else 128 if mean > 1 else 64, _fitting(size_in, 128), 4, 3
    return 64, 64, _fitting(size_in, 64), 4, 3


FIXED: tuple[int, int, int] = (64, 64, 64)  # rows, columns and inner size of a tile where it must not change


def fixed_tiles(size_in, element_size):
    """Tiles of one shape for any number of rows: 64, as a Hopper card's matrix instruction has, for few and many."""
    if element_size == 4:
        return 16, 32, 32, 4, 2
    rows, columns, inner = FIXED
    return rows, columns, _fitting(size_in, inner), 4, 3


def _fitting(size_in: int, most: int) -> int:
    """The largest power of two up to `most`, at least 32, that divides size_in, else 32."""
    while most > 32 and size_in % most:
        most //= 2
    return most


@triton.jit
def _route(
    logits, ids, weights, num, TOP: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    x = tl.load(logits + row * num + e, mask=e < num, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 0))
    p = p / tl.sum(p, 0)
    k = tl.arange(0, BT)
    chosen = tl.zeros([BT], tl.int32)
    weight = tl.zeros([BT], tl.float32)
    left = tl.where(e < num, p, -1.0)
    for i in tl.static_range(TOP):
        best = tl.max(left, 0)
        which = tl.min(tl.where(left == best, e, BLOCK - 1), 0)
        chosen = tl.where(k == i, which, chosen)
        weight = tl.where(k == i, best, weight)
        left = tl.where(e == which, -1.0, left)
    if NORM:
        weight = weight / tl.sum(weight, 0)
    tl.store(ids + row * TOP + k, chosen, mask=k < TOP)
    tl.store(weights + row * TOP + k, weight, mask=k < TOP)


@triton.jit
def _bucket(ids, pairs, counts, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = 0
    for start in range(0, num_pairs, BLOCK):
        p = start + tl.arange(0, BLOCK)
        mine = tl.load(ids + p, mask=p < num_pairs, other=-1) == expert
        one = mine.to(tl.int32)
        place = found + tl.cumsum(one, 0) - one
        tl.store(pairs + expert.to(tl.int64) * num_pairs + place, p, mask=mine)
        found += tl.sum(one, 0)
    tl.store(counts + expert, found)


@triton.jit
def _locate(counts, block, num_experts, BE: tl.constexpr, BM: tl.constexpr):
    """Expert of a row block, the block's first row among the expert's, and the expert's rows; 0 rows: nothing to do."""
    e = tl.arange(0, BE)
    count = tl.load(counts + e, mask=e < num_experts, other=0)
    blocks = (count + BM - 1) // BM
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, blocks, 0), 0)
    rows = tl.sum(tl.where(e == expert, count, 0), 0)
    return expert, (block - before) * BM, rows


@triton.jit
def _gated(
    x, gate_up, norm, pairs, counts, out, num_pairs, N, H, num_experts, eps, limit,
    LIMIT: tl.constexpr, TOP: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, first, rows = _locate(counts, tl.program_id(0), num_experts, BE, BM)
    if rows > first:
        m = first + tl.arange(0, BM)
        in_m = m < rows
        pair = tl.load(pairs + expert.to(tl.int64) * num_pairs + m, mask=in_m, other=0)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        x_at = x + (pair // TOP).to(tl.int64)[:, None] * H + k[None, :]
        w_at = gate_up + (expert.to(tl.int64) * 2 * N + n[None, :]) * H + k[:, None]
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        squares = tl.zeros([BM], tl.float32)
        for start in range(0, H, BK):
            in_k = start + k < H
            if EVEN:
                tokens = tl.load(x_at + start, mask=in_m[:, None], other=0.0)
                w_gate = tl.load(w_at + start)
                w_up = tl.load(w_at + start + N.to(tl.int64) * H)
            else:
                inside = in_k[:, None] & (n < N)[None, :]
                tokens = tl.load(x_at + start, mask=in_m[:, None] & in_k[None, :], other=0.0)
                w_gate = tl.load(w_at + start, mask=inside, other=0.0)
                w_up = tl.load(w_at + start + N.to(tl.int64) * H, mask=inside, other=0.0)
            if NORM:
                wide = tokens.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                scale = tl.load(norm + start + k, mask=in_k, other=0.0).to(tl.float32)
                tokens = (wide * scale[None, :]).to(w_gate.dtype)
            gate = tl.dot(tokens, w_gate, gate, input_precision="ieee")
            up = tl.dot(tokens, w_up, up, input_precision="ieee")
        if NORM:
            root = tl.rsqrt(squares / H + eps)[:, None]
            gate *= root
            up *= root
        if LIMIT:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        value = gate / (1.0 + tl.exp(-gate)) * up
        at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=in_m[:, None] & (n < N)[None, :])


@triton.jit
def _down(
    h, down, weights, pairs, counts, out, num_pairs, N, W, num_experts,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, first, rows = _locate(counts, tl.program_id(0), num_experts, BE, BM)
    if rows > first:
        m = first + tl.arange(0, BM)
        in_m = m < rows
        pair = tl.load(pairs + expert.to(tl.int64) * num_pairs + m, mask=in_m, other=0)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        h_at = h + pair.to(tl.int64)[:, None] * W + k[None, :]
        w_at = down + (expert.to(tl.int64) * N + n[None, :]) * W + k[:, None]
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, W, BK):
            if EVEN:
                rows_h = tl.load(h_at + start, mask=in_m[:, None], other=0.0)
                w = tl.load(w_at + start)
            else:
                in_k = start + k < W
                rows_h = tl.load(h_at + start, mask=in_m[:, None] & in_k[None, :], other=0.0)
                w = tl.load(w_at + start, mask=in_k[:, None] & (n < N)[None, :], other=0.0)
            acc = tl.dot(rows_h, w, acc, input_precision="ieee")
        acc *= tl.load(weights + pair, mask=in_m, other=0.0)[:, None]
        at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & (n < N)[None, :])


@triton.jit
def _sum(
    y, place, weights, residual, hidden, TOP: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < hidden
    total = tl.load(residual + row * hidden + i, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP):
        pair = row * TOP + j
        if SORTED:
            at = tl.load(place + pair).to(tl.int64)
            weight = tl.load(weights + pair)
            total += weight * tl.load(y + at * hidden + i, mask=inside, other=0.0).to(tl.float32)
        else:
            total += tl.load(y + pair * hidden + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + row * hidden + i, total.to(residual.dtype.element_ty), mask=inside)
