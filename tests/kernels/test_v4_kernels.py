"""DeepSeek-V4's smaller kernels: compressor, norms and turns, hyper-connections, router; over odd shapes and dtypes.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run compiled on a card.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from v4_cases import DEVICE, DTYPES, near, random, section, token_rows, wide

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import hyper_connections as hyper
from flowinfer.kernels.compressor import Pool, compress, compress_reference
from flowinfer.kernels.experts import bucket, gather_gated
from flowinfer.kernels.hyper_connections import triton as hyper_kernel
from flowinfer.kernels.norm_turn import norm_turn, norm_turn_reference
from flowinfer.kernels.router import choose_experts, choose_experts_reference
from flowinfer.kernels.token_rows import TokenRows, Turn

torch.set_num_threads(1)
EPS = 1e-6


def some_turn(tokens: int, half: int) -> Turn:
    angles = random(tokens, half, seed=8)
    return Turn(angles.cos(), angles.sin())


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().cpu() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "half"), [(1, 24, 4), (5, 16, 8), (3, 40, 0)])
def test_heads_are_normed_and_turned(heads: int, size: int, half: int, dtype: torch.dtype) -> None:
    x = random(4, heads * size + 8, dtype=dtype)[:, 8:].unflatten(1, (heads, size))
    weight, turn = random(size, seed=1), some_turn(4, half) if half else None
    wide_turn = Turn(*doubled(*turn)) if turn else None
    for options in ({}, {"eps": EPS}, {"eps": EPS, "weight_D": weight}):
        want = norm_turn_reference(x.double().cpu(), turn=wide_turn, **{
            name: value.double().cpu() if isinstance(value, Tensor) else value for name, value in options.items()
        })  # fmt: skip
        near(norm_turn(x, turn=turn, **options), want, dtype)


def test_keys_go_to_their_places_and_padding_nowhere() -> None:
    rows = token_rows([(14, 3), (40, 1)], page=16, padding=2)
    x, turn = random(6, 1, 16), some_turn(6, 4)
    got, want = (section(rows, 16, 16, torch.float32).clone() for _ in range(2))
    norm_turn(x, eps=EPS, turn=turn, into=(got, rows))
    cpu = want.double().cpu()
    norm_turn_reference(x.double().cpu(), eps=EPS, turn=Turn(*doubled(*turn)), into=(cpu, wide(rows)))
    near(got, cpu, torch.float32)
    assert (got != want).any(-1).sum() == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rate", "size", "overlap", "ring"), [(4, 16, True, 16), (4, 24, True, 16), (16, 16, False, 32)]
)
@pytest.mark.parametrize("cuts", [[40], [3, 4, 1, 9, 1, 1, 1, 1, 1, 18]])
def test_entries_of_any_cuts(
    rate: int, size: int, overlap: bool, ring: int, cuts: list[int], dtype: torch.dtype
) -> None:
    """Two sequences, one of them 5 tokens behind; a step of single tokens keeps and closes in one launch."""
    width = 2 * size if rate == 4 else size  # where groups overlap
    pool = Pool(random(rate, width, seed=1), random(size, seed=2), EPS)
    values = random(80, 2 * width + 4, dtype=dtype)[:, 4:]
    page = 32
    every = token_rows([(0, 45), (0, 40)], page=page)
    got = [section(every, page // rate, size, dtype), section(every, ring, 2 * width, dtype, seed=1)]
    want = [part.double().cpu() for part in got]
    start = 0
    for count in cuts:
        rows = token_rows([(start + 5, count), (start, count)], page=page, most=2)
        tokens = torch.cat((values[start : start + count], values[40 + start : 40 + start + count]))
        turn = some_turn(2 * count, 4)
        compress(tokens, pool, *got, rows, turn)
        compress_reference(
            tokens.double().cpu(), Pool(*doubled(*pool[:2]), EPS), *want, wide(rows), Turn(*doubled(*turn))
        )
        start += count
    for ours, theirs in zip(got, want, strict=True):
        near(ours, theirs, dtype)


def test_entries_of_a_replay_stay() -> None:
    rows = token_rows([(0, 16)], page=16)
    rows = TokenRows(*rows[:5], torch.full_like(rows.slots, 8), *rows[6:])
    entries, tail = section(rows, 4, 16, torch.float32), section(rows, 16, 64, torch.float32)
    before = entries.clone()
    pool = Pool(random(4, 32), random(16), EPS)
    compress(random(16, 64), pool, entries, tail, rows, some_turn(16, 4))
    changed = (entries != before).any(-1)[rows.block_tables[0, 0].item()]
    assert changed.tolist() == [False, False, True, True]


def some_streams(tokens: int, streams: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    count = (2 + streams) * streams
    weights = [random(count, streams * hidden) * 0.1, random(count, seed=1), random(3, seed=2), random(hidden, seed=3)]
    return random(tokens, streams, hidden, dtype=dtype, seed=4), weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "hidden", "span"), [(4, 40, 2048), (2, 33, 2048), (4, 300, 512)])
def test_streams_are_mixed_and_spread(
    streams: int, hidden: int, span: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_kernel, "SPAN", span)
    x, weights = some_streams(3, streams, hidden, dtype)
    options: dict[str, Any] = {"iterations": 5, "eps": EPS, "norm_eps": EPS}
    got = hyper.mix(x, *weights, **options)
    want = hyper.mix_reference(*doubled(x, *weights), **options)
    for ours, theirs, kind in zip(got, want, (dtype, torch.float32, torch.float32), strict=True):
        near(ours, theirs, kind)
    delta = random(6, hidden, dtype=dtype, seed=7)
    spread = hyper.spread_reference(*doubled(x, delta), *want[1:])
    near(hyper.spread(x.clone(), delta, got), spread, dtype)
    few = [weights[0][:streams].contiguous(), weights[1][:streams].contiguous(), weights[2][:1], weights[3]]
    near(
        hyper.collapse(x, *few, eps=EPS, norm_eps=EPS),
        hyper.collapse_reference(*doubled(x, *few), eps=EPS, norm_eps=EPS),
        dtype,
    )


def test_streams_are_mixed_as_the_model_mixes_them() -> None:
    from flowinfer.engine.models.deepseek_v4.ops import merge, rms, spread, stream_weights

    x, (fn, base, scale, norm) = some_streams(3, 4, 24, torch.float32)
    got = hyper.mix(x, fn, base, scale, norm, iterations=20, eps=EPS, norm_eps=EPS)
    pre, post, comb = stream_weights(x, fn, base, scale, iterations=20, eps=EPS, norm_eps=EPS)
    near(got.normed, rms(merge(x, pre), norm, EPS), torch.float32)
    delta = random(3, 24)
    near(hyper.spread(x.clone(), delta, got), spread(x, delta, post, comb), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "top"), [(16, 2), (5, 5), (24, 6)])
def test_experts_are_chosen(num: int, top: int, dtype: torch.dtype) -> None:
    logits = (random(7, num + 3, dtype=dtype) * 6)[:, :num]
    logits[0] = torch.linspace(-30, 30, num)
    bias = random(num, seed=1)
    ids, weights = choose_experts(logits, top, scale=1.5, bias_E=bias, shared=True)
    want_ids, want = choose_experts_reference(*doubled(logits), top, scale=1.5, bias_E=bias.double().cpu(), shared=True)
    assert torch.equal(ids.cpu(), want_ids)
    near(weights, want, torch.float32)
    table = torch.stack([torch.randperm(num)[:top] for _ in range(20)]).to(DEVICE)
    tokens = torch.tensor([3, 3, 19, 0, 1, 2, 5], device=DEVICE)
    ids, weights = choose_experts(logits, top, scale=1.5, chosen_VK=table, tokens_T=tokens)
    options = {"chosen_VK": table.cpu(), "tokens_T": tokens.cpu()}
    want_ids, want = choose_experts_reference(*doubled(logits), top, scale=1.5, **options)
    assert torch.equal(ids.cpu(), want_ids)
    near(weights, want, torch.float32)


def test_equal_scores_go_to_the_lowest_expert() -> None:
    ids, _ = choose_experts(torch.zeros(1, 9, device=DEVICE), 3, scale=1.0, bias_E=torch.zeros(9, device=DEVICE))
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("fixed", [False, True])
def test_gates_of_experts_are_limited(fixed: bool) -> None:
    x, gate_up = random(3, 32) * 4, random(2, 32, 32, seed=1)
    ids = torch.tensor([[0], [1], [0]], dtype=torch.int32, device=DEVICE)
    routing = bucket(ids, torch.ones(3, 1, device=DEVICE), 2)
    gate, up = torch.einsum("th,toh->to", x.double().cpu(), gate_up.double().cpu()[ids[:, 0].cpu().long()]).chunk(2, 1)
    want = torch.nn.functional.silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)
    near(gather_gated(x, gate_up, routing, fixed=fixed, limit=2.0), want, torch.float32)


def test_what_does_not_fit_is_refused() -> None:
    rows = token_rows([(0, 2)], page=16)
    with pytest.raises(KernelUnsupported, match="contiguous heads"):
        norm_turn(random(2, 16, 3).transpose(1, 2))
    with pytest.raises(KernelUnsupported, match="don't fit"):
        norm_turn(random(2, 1, 8), into=(section(rows, 16, 16, torch.float32), rows))
    with pytest.raises(KernelUnsupported, match="bias"):
        entries, tail = section(rows, 4, 16, torch.float32), section(rows, 16, 16, torch.float32)
        compress(random(2, 64), Pool(random(4, 32), random(16), EPS), entries, tail, rows, some_turn(2, 4))
    x, (fn, base, scale, norm) = some_streams(2, 3, 8, torch.float32)
    with pytest.raises(KernelUnsupported, match="power of two"):
        hyper.mix(x, fn, base, scale, norm, iterations=2, eps=EPS, norm_eps=EPS)
    with pytest.raises(KernelUnsupported, match="can't choose"):
        choose_experts(random(2, 4), 5, scale=1.0, bias_E=random(4))
    with pytest.raises(KernelUnsupported, match="or by a table"):
        choose_experts(random(2, 4), 2, scale=1.0)
