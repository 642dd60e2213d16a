"""The paged kernel against its plain reference, over mixed shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.paged_attention import (
    paged_attention,
    paged_attention_reference,
    plan_attention,
    wipe_fresh_blocks,
)
from flowinfer.kernels.paged_attention.plan import FREE_PADDING, MOST_PADDING, split_by_length

torch.set_num_threads(1)

BLOCK = 8  # tokens; small, so that short contexts cross many blocks
# Context before the step, and tokens in it, of each sequence.
Sequences = list[tuple[int, int]]
lengths = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 17, 30])), min_size=1, max_size=7)


def _case(sequences: Sequences, *, heads: tuple[int, int], dtype: torch.dtype) -> dict[str, object]:
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    num_heads, num_kv_heads = heads
    counts = [count for _, count in sequences]
    kv_lens = np.array([before + count for before, count in sequences], np.int32)
    most = -(-int(kv_lens.max()) // BLOCK)
    num_blocks = most * len(sequences) + 2
    tables = rng.permutation(num_blocks)[: most * len(sequences)].reshape(len(sequences), most).astype(np.int32)
    total, head_dim = sum(counts), 16
    return {
        "q": torch.randn(total, num_heads, head_dim).to(dtype),
        "k": torch.randn(total, num_kv_heads, head_dim).to(dtype),
        "v": torch.randn(total, num_kv_heads, head_dim).to(dtype),
        "kv": torch.randn(num_blocks, 3, 2, BLOCK, num_kv_heads, head_dim).to(dtype),
        "starts": np.cumsum([0, *counts]).astype(np.int32),
        "kv_lens": kv_lens,
        "tables": tables,
    }


def _check(sequences: Sequences, heads: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    case = _case(sequences, heads=heads, dtype=dtype)
    q, k, v, kv = (case[name] for name in ("q", "k", "v", "kv"))
    step = case["starts"], case["kv_lens"], case["tables"]
    other = kv.clone()
    plan = plan_attention(*step, kv=kv, num_heads=heads[0], num_kv_heads=heads[1])
    wipe_fresh_blocks(kv, plan), wipe_fresh_blocks(other, plan)
    got = paged_attention(q, k, v, kv, 1, plan)
    want = paged_attention_reference(q, k, v, other, 1, *step)
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)
    assert torch.equal(kv, other), "the same memory was written"


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([(6, 2), (4, 4), (8, 1)]))
def test_float32_equals_the_reference(sequences: Sequences, heads: tuple[int, int]) -> None:
    _check(sequences, heads, torch.float32, 1e-5)


@settings(max_examples=30, deadline=None)
@given(lengths, st.sampled_from([(6, 2), (8, 1)]))
def test_bfloat16_is_near_the_reference(sequences: Sequences, heads: tuple[int, int]) -> None:
    _check(sequences, heads, torch.bfloat16, 3e-2)


@pytest.mark.parametrize("batch", [3, 40])
def test_large_decode_batches_in_bfloat16(batch: int) -> None:
    _check([(37 + i % 7, 1) for i in range(batch)], (6, 2), torch.bfloat16, 3e-2)


def test_nan_of_an_earlier_tenant_never_comes_through() -> None:
    case = _case([(0, 1), (8, 1), (0, 20)], heads=(4, 2), dtype=torch.float32)
    kv = case["kv"]
    for s, block in ((0, 0), (1, 1), (2, 2)):
        kv[case["tables"][s, block]] = float("nan")
    plan = plan_attention(case["starts"], case["kv_lens"], case["tables"], kv=kv, num_heads=4, num_kv_heads=2)
    wipe_fresh_blocks(kv, plan)
    assert paged_attention(case["q"], case["k"], case["v"], kv, 0, plan).isfinite().all()


def test_other_dtypes_of_query_and_kv_are_refused() -> None:
    case = _case([(3, 1)], heads=(4, 2), dtype=torch.float32)
    plan = plan_attention(case["starts"], case["kv_lens"], case["tables"], kv=case["kv"], num_heads=4, num_kv_heads=2)
    with pytest.raises(KernelUnsupported, match="float32"):
        paged_attention(case["q"].bfloat16(), case["k"], case["v"], case["kv"], 0, plan)


@given(st.lists(st.integers(1, 8000), min_size=1, max_size=40))
def test_groups_hold_every_sequence_once_and_waste_little(kv_lens: list[int]) -> None:
    lengths_S = np.array(kv_lens)
    parts = split_by_length(np.arange(len(kv_lens)), lengths_S)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(kv_lens)))
    for part in parts:
        padded = int(lengths_S[part].max()) * len(part)
        assert padded - int(lengths_S[part].sum()) <= max(FREE_PADDING, MOST_PADDING * padded)
