"""The lightning indexer's choice: the same entries as a stable sort of float64 scores, whatever stands beside a token.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run compiled on a card.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from v4_cases import DEVICE, DTYPES, near, random, section, token_rows, wide

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import indexer_topk as module
from flowinfer.kernels.indexer_topk import index_scores_reference, indexer_topk, indexer_topk_reference
from flowinfer.kernels.indexer_topk import triton as kernel
from flowinfer.kernels.token_rows import TokenRows

torch.set_num_threads(1)


def whole_numbers(*shape: int, most: int, seed: int) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)


def reference(q: Tensor, weights: Tensor, keys: Tensor, rows: TokenRows, rate: int, top: int) -> Tensor:
    return indexer_topk_reference(
        q.double().cpu(), weights.double().cpu(), keys.double().cpu(), wide(rows), rate=rate, top=top
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "size", "rate", "top", "steps"),
    [
        (8, 16, 4, 8, [(0, 5), (61, 3), (200, 1)]),
        (3, 64, 2, 5, [(30, 2), (9, 4)]),
        (16, 16, 4, 33, [(150, 2), (1, 1)]),
    ],
)  # fmt: skip
def test_the_choice_is_that_of_a_stable_sort(
    heads: int, size: int, rate: int, top: int, steps: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Small whole numbers: scores are exact in every dtype, and many are equal."""
    rows = token_rows(steps, page=16, padding=2)
    tokens = len(rows.slots)
    q = whole_numbers(tokens, heads, size, most=2, seed=1).to(dtype)
    weights = whole_numbers(tokens, heads, most=3, seed=2)
    keys = section(rows, 16 // rate, size, dtype, seed=3, integers=1)
    got = indexer_topk(q, weights, keys, rows, rate=rate, top=top)
    assert torch.equal(got.cpu(), reference(q, weights, keys, rows, rate, top))


def test_long_contexts_are_counted_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "AT_ONCE", 256)
    monkeypatch.setattr(module, "SCORE_BYTES", 4096)  # and tokens come in parts
    rows = token_rows([(2500, 2), (1300, 1)], page=64)
    q, weights = whole_numbers(3, 4, 16, most=2, seed=4), whole_numbers(3, 4, most=2, seed=5)
    keys = section(rows, 16, 16, torch.float32, seed=6, integers=1)
    got = indexer_topk(q, weights, keys, rows, rate=4, top=100)
    assert torch.equal(got.cpu(), reference(q, weights, keys, rows, 4, 100))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_numbers_are_right(dtype: torch.dtype) -> None:
    rows = token_rows([(90, 2), (40, 1)], page=16)
    q, weights = random(3, 5, 24, dtype=dtype), random(3, 5, seed=1)
    keys = section(rows, 4, 24, dtype, seed=2)
    scores = torch.full((3, rows.most_tokens // 4), float("nan"), device=DEVICE)
    kernel.launch_scores(q, weights, keys, rows, 4, 2, scores)
    for t, position in enumerate(rows.positions.tolist()):
        numbers = torch.arange((position + 1) // 4, device=DEVICE)
        own = keys[rows.block_tables[rows.slots[t]].long()[numbers // 4], numbers % 4]
        want = index_scores_reference(q[t].double(), weights[t].double(), own.double())
        near(scores[t, : len(numbers)], want, torch.float32)


def test_negative_scores_and_both_zeros_are_ordered() -> None:
    rows = token_rows([(79, 1)], page=16)
    scores = torch.zeros(1, 20, device=DEVICE)
    scores[0, :8] = torch.tensor([-1.0, 3.0, -2.0, 0.5, -3.0, 3.0, float("inf"), -1e-30], device=DEVICE)
    scores[0, 8:] = -4.0
    chosen = torch.empty(1, 6, dtype=torch.int32, device=DEVICE)
    kernel.launch_choose(scores, rows, 4, chosen)
    assert chosen.tolist() == [[0, 1, 3, 5, 6, 7]]


def test_the_choice_does_not_depend_on_other_tokens() -> None:
    rows = token_rows([(300, 4), (33, 2)], page=32)
    q, weights = random(6, 4, 16), random(6, 4, seed=1)
    keys = section(rows, 8, 16, torch.float32, seed=2)
    whole = indexer_topk(q, weights, keys, rows, rate=4, top=9)
    for t in range(6):
        part = slice(t, t + 1)
        assert torch.equal(indexer_topk(q[part], weights[part], keys, rows.part(part), rate=4, top=9), whole[part])


def test_what_does_not_fit_is_refused() -> None:
    rows = token_rows([(20, 1)], page=16)
    q, weights, keys = random(1, 4, 16), random(1, 4), section(rows, 4, 16, torch.float32)
    with pytest.raises(KernelUnsupported, match="bfloat16"):
        indexer_topk(q, weights, keys.bfloat16(), rows, rate=4, top=2)
    with pytest.raises(KernelUnsupported, match="contiguous"):
        indexer_topk(q.transpose(1, 2).contiguous().transpose(1, 2), weights, keys, rows, rate=4, top=2)
    with pytest.raises(KernelUnsupported, match="8 tokens an entry"):
        indexer_topk(q, weights, keys, rows, rate=8, top=2)
