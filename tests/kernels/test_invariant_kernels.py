"""The kernels of the batch-invariant mode under Triton's interpreter: right, and the same for a row in any company.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run compiled on a card.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import invariant_attention as attention
from flowinfer.kernels.experts import bucket, gather_gated, route, weighted
from flowinfer.kernels.invariant_attention import triton as attention_kernel
from flowinfer.kernels.invariant_linear import invariant_linear, invariant_linear_reference
from flowinfer.kernels.prefill_attention import Tiling, plan_tiles
from flowinfer.kernels.rope import Heads

torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=made).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size_in", "size_out"), [(1, 64, 48), (3, 192, 40), (70, 100, 33)])
def test_products_are_right(rows: int, size_in: int, size_out: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, size_in, dtype=dtype), random(size_out, size_in, dtype=dtype)
    bias = random(size_out, dtype=dtype, seed=2)
    want = invariant_linear_reference(x.double(), weight.double(), bias_O=bias.double())
    for wide in (False, True):
        got = invariant_linear(x, weight, bias_O=bias, wide=wide).double()
        assert (got - want).norm() < (2e-5 if dtype is torch.float32 else 2e-2) * want.norm()
    if size_out % 2 == 0:
        want = invariant_linear_reference(x.double(), weight.double(), gated=True)
        got = invariant_linear(x, weight, gated=True).double()
        assert (got - want).norm() < (2e-5 if dtype is torch.float32 else 2e-2) * want.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    x, weight = random(70, 96, dtype=dtype), random(40, 96, dtype=dtype)
    whole = invariant_linear(x, weight)
    for at, count in ((0, 1), (69, 1), (5, 3), (1, 64)):
        assert torch.equal(invariant_linear(x[at : at + count], weight), whole[at : at + count])


def test_products_refuse_what_does_not_fit() -> None:
    with pytest.raises(KernelUnsupported, match="bfloat16"):
        invariant_linear(random(2, 16), random(16, 16, dtype=torch.bfloat16))
    with pytest.raises(KernelUnsupported, match="without a bias"):
        invariant_linear(random(2, 16), random(16, 16), bias_O=random(16), gated=True)
    with pytest.raises(KernelUnsupported, match="contiguous"):
        invariant_linear(random(16, 2).t(), random(8, 16))


def test_no_rows_give_no_rows() -> None:
    assert invariant_linear(random(0, 16), random(8, 16)).shape == (0, 8)


def test_experts_of_a_token_are_the_same_alone_and_among_others() -> None:
    x, gate_up, down = random(20, 32), random(4, 32, 32, seed=1), random(4, 32, 16, seed=2)
    logits = random(20, 4, seed=3)

    def run(part: slice) -> Tensor:
        ids, weights = route(logits[part].contiguous(), 2, norm_topk=True)
        routing = bucket(ids, weights, 4)
        gated = gather_gated(x[part].contiguous(), gate_up, routing, fixed=True)
        return weighted(gated, down, routing, fixed=True)

    whole = run(slice(0, 20))
    for at, count in ((0, 1), (7, 1), (3, 9)):
        assert torch.equal(run(slice(at, at + count)), whole[2 * at : 2 * (at + count)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_right_and_the_same_in_decode_and_prefill(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPLIT_PAGES", 1)
    monkeypatch.setattr(attention_kernel, "SPLIT_PAGES", 1)
    heads, length, page = Heads(4, 2, 16), 75, 32
    q, kv = random(length, 4, 16, dtype=dtype), random(4, 1, 2, 2, page, 16, dtype=dtype, seed=1)
    table = np.array([[3, 0, 2]], np.int32)

    def prefill(first: int, count: int) -> Tensor:
        starts, lengths = np.array([0, count], np.int32), np.array([first + count], np.int32)
        tiling = plan_tiles(
            starts, lengths, table, heads=heads, device=torch.device(DEVICE), dtype=dtype, rows=attention.TILE_ROWS
        )
        return attention.invariant_attention(q[first : first + count], kv, 0, heads, tiling)

    whole = prefill(0, length)
    arrays = np.array([0, length], np.int32), np.array([length], np.int32), table
    want = attention.invariant_attention_reference(q.double(), kv.double(), 0, heads, *arrays)
    assert (whole.double() - want).norm() < (2e-5 if dtype is torch.float32 else 2e-2) * want.norm()
    assert torch.equal(torch.cat([prefill(0, 40), prefill(40, 34), prefill(74, 1)]), whole)
    at = torch.tensor([5, 31, 32, 63, 64, 74])
    rows = torch.arange(7, dtype=torch.int32, device=DEVICE)
    tables = torch.from_numpy(table).to(DEVICE).expand(6, -1).contiguous()
    tiles = torch.stack((rows[:6], rows[:6] * 0), 1)
    tiling = Tiling(tiles, rows, (at + 1).int().to(DEVICE), tables, tokens=32)
    parts = attention.Parts.make(6, 3, heads, torch.device(DEVICE))
    for _ in range(2):  # the counters are ready for the next step
        assert torch.equal(attention.invariant_attention(q[at], kv, 0, heads, tiling, parts=parts), whole[at])


SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "flowinfer_random_weights": True,
}  # fmt: skip
SHAPES = {
    "LlamaForCausalLM": {},
    "Qwen3MoeForCausalLM": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*SHAPES][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in [*SHAPES][1:]])
def test_a_token_decoded_has_the_bytes_of_a_token_prefilled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowinfer.engine.models import fused_invariant, load_model
    from flowinfer.engine.models import load as loading
    from flowinfer.engine.models.invariant import Invariance
    from flowinfer.engine.models.linear import Linear
    from flowinfer.engine.step import StepInput
    from flowinfer.kernels.decode_attention import DecodeBatch, Scratch

    monkeypatch.setattr(loading, "_can_fuse", lambda device, dtype: True)
    if DEVICE == "cpu":  # each program costs a millisecond here
        monkeypatch.setattr(fused_invariant, "_CASES", ((0, 1), (60, 16)))
        monkeypatch.setattr(fused_invariant, "same_when_wide", lambda weight, gated: False)
    monkeypatch.setattr(Invariance, "linear", lambda self, weight, bias=None: Linear(weight, bias))
    (tmp_path / "config.json").write_text(json.dumps(SMALL | SHAPES[name] | {"architectures": [name]}))
    model: Any = load_model(tmp_path, dtype="float32", device=DEVICE, batch_invariant=True)
    config = model.config
    tokens = np.random.default_rng(0).integers(3, 48, 67).astype(np.int32)

    def arena() -> Tensor:
        shape = (4, config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
        return torch.zeros(shape, device=DEVICE)

    def run(kv: Tensor, start: int, count: int) -> Tensor:
        step = StepInput(
            tokens=torch.from_numpy(tokens[start : start + count].astype(np.int64)).to(DEVICE),
            positions=torch.arange(start, start + count, device=DEVICE),
            query_starts=np.array([0, count], np.int32),
            kv_lens=np.array([start + count], np.int32),
            block_tables=np.array([[2, 1]], np.int32),
            logit_rows=torch.arange(count, device=DEVICE),
        )
        logits: Tensor = model.forward(step, kv)
        return logits

    whole_kv, kv = arena(), arena()
    whole = run(whole_kv, 0, 67)
    assert torch.equal(torch.cat([run(kv, 0, 63), run(kv, 63, 3)]), whole[:66])
    batch = DecodeBatch(
        torch.tensor([-1, 0, -1], dtype=torch.int32, device=DEVICE),
        torch.tensor([67], dtype=torch.int32, device=DEVICE),
        torch.tensor([[2, 1]], dtype=torch.int32, device=DEVICE),
    )
    last = torch.from_numpy(tokens[66:]).to(DEVICE)
    with torch.inference_mode():
        decoded = model.decode(last, batch, kv, Scratch.make(1, model.heads, torch.device(DEVICE)))
    assert torch.equal(decoded[1].float(), whole[66])
    assert torch.equal(kv, whole_kv)
