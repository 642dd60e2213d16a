"""Drawn tokens against the sampler's reference: what each pass over a row leaves to the next, and odd logits."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import draw
from flowinfer.kernels.draw import SlotSettings, advance_drawn, advance_drawn_reference, draw_scratch

pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
INF = float("inf")
Row = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
FILTERS: list[Row] = [
    (0.8, 0, 1.0, 0.0), (0.8, 5, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (0.8, 0, 1.0, 0.05), (0.8, 50, 0.9, 0.0),
    (1.5, 300, 0.5, 1e-4), (0.3, 1, 0.1, 0.0), (4.0, 0, 0.999999, 0.0), (0.7, 10**6, 0.0, 1.0),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several programs, whose edges have more tokens beside them than one program decides about."""
    from flowinfer.kernels.draw import triton

    if DEVICE == "cpu":
        for module in (draw, triton):
            monkeypatch.setattr(module, "CHUNK", 512)
            monkeypatch.setattr(module, "LISTED", 64)


def drawn(logits: Tensor, rows: list[Row], calls: int = 1, padding: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, int]:
    """Tokens by the op and by its reference, [calls, rows], and how many rows' lists were too long for one program."""
    count, vocab = logits.shape
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    seeds = torch.arange(count) * 0x9E3779B97F4A7C1 - 5
    settings = SlotSettings(columns[0].float(), columns[1].int(), columns[2].float(), columns[3].float(), seeds)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(1)).argsort().int()
    for row in padding:
        slots[row] = -1
    logits = logits[slots.long().clamp(min=0)].contiguous()  # row r of what was given has the settings of rows[r]
    state = [torch.zeros(count).int(), torch.arange(count).int() + 3, torch.zeros(count).int()]
    mine = [tensor.clone().to(DEVICE) for tensor in (slots, *state)]
    scratch = draw_scratch(count, vocab, torch.device(DEVICE))
    got, want = [], []
    long = 0
    for _ in range(calls):
        with np.errstate(over="ignore", invalid="ignore"):
            moved = SlotSettings(*(column.to(DEVICE) for column in settings))
            advance_drawn(logits.to(DEVICE), mine[0], mine[1], mine[2], mine[3], moved, scratch)
        advance_drawn_reference(logits, slots, state[0], state[1], state[2], settings)
        for my, their in zip(mine[:3], (slots, *state[:2]), strict=True):
            assert torch.equal(my.cpu(), their)
        got.append(mine[3].cpu().clone())
        want.append(state[2].clone())
        assert not scratch.arrived.any(), "the next call counts from zero"
        searched = (mine[0] >= 0) & (scratch.modes > 0)
        long += int((searched & (scratch.found > draw.LISTED)).sum())
    return torch.stack(got), torch.stack(want), long


def spread(rows: int, vocab: int = 1300, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "spread": lambda x: x,
    "flat": lambda x: x * 0.02,
    "all alike": lambda x: x * 0 - 1.5,
    "groups of ties": lambda x: x.round(),
    "one far above": lambda x: x.index_fill(1, torch.tensor([1000]), 60.0),
    "most blocked": lambda x: x.masked_fill(torch.arange(x.shape[1]) % 17 > 0, -INF),
    "most pushed down": lambda x: x.masked_fill(torch.arange(x.shape[1]) % 17 > 0, -1e9),
    "far from zero": lambda x: x + 3e4,
    "far below zero": lambda x: x - 1e5,
    "zeros of both signs": lambda x: torch.where(torch.arange(x.shape[1]) % 2 == 0, x.clamp(max=0), -x.clamp(max=0)),
    "huge": lambda x: x * 1e37,
    "tiny": lambda x: x * 1e-42,
}
ALSO = [(shape, torch.bfloat16) for shape in ("spread", "flat", "zeros of both signs")]


@pytest.mark.parametrize(("shape", "dtype"), [*((shape, torch.float32) for shape in SHAPES), *ALSO])
def test_tokens_are_those_of_the_reference(shape: str, dtype: torch.dtype) -> None:
    logits = SHAPES[shape](spread(len(FILTERS))).to(dtype)
    got, want, long = drawn(logits, FILTERS)
    assert torch.equal(got, want)
    if DEVICE == "cpu" and shape == "all alike":
        assert long > 3, "one program's list should be too short for these"


def test_a_scratch_serves_call_after_call() -> None:
    got, want, _ = drawn(spread(len(FILTERS)), FILTERS, calls=3)
    assert torch.equal(got, want)
    assert (got[0] != got[1]).any(), "each position has noise of its own"


def test_rows_that_are_not_finite_and_padding_give_minus_one() -> None:
    rows = [(heat, *row[1:]) for row in FILTERS for heat in (0.0, 0.8)]
    logits = spread(len(rows), 700)
    logits[1, 600] = float("nan")
    logits[4, 3] = INF
    logits[7] = -INF
    got, want, _ = drawn(logits, rows, padding=(2, 9))
    assert torch.equal(got, want)
    assert (got[0] == -1).sum() >= 3


@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 513])
def test_vocabularies_around_a_program(vocab: int) -> None:
    got, want, _ = drawn(spread(len(FILTERS), vocab), FILTERS)
    assert torch.equal(got, want)


def test_the_edge_of_few_among_many_is_found_in_passes() -> None:
    """Top-k over more than a list holds, and a nucleus of half of the tokens, whose neighbours fit into one."""
    rows: list[Row] = [(1.0, 800, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 800, 0.6, 0.0), (2.0, 1500, 1.0, 0.0)]
    got, want, long = drawn(spread(4, 1700, 1.0), rows)
    assert torch.equal(got, want)
    if DEVICE == "cpu":
        assert long == 1, "top-k and top-p together must list all that top-k leaves"


@hypothesis_settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from([-INF, -4.0, -0.0, 0.0, 0.5, 1.5, 1.5625, 9.0]), min_size=2, max_size=40),
    st.sampled_from([0.05, 0.7, 1.0, 3.0]), st.integers(0, 45), st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 3),
)  # fmt: skip
def test_few_values_tie_as_in_the_reference(
    values: list[float], heat: float, top_k: int, top_p: float, min_p: float, far: int
) -> None:
    logits = torch.tensor([values]).repeat(1, 1 + 9 * far)[:, :600]
    got, want, _ = drawn(logits, [(heat, top_k, top_p, min_p)])
    assert torch.equal(got, want)


def test_what_it_has_no_room_for_is_refused() -> None:
    settings, some = SlotSettings.make(2, torch.device("cpu")), torch.zeros(2, dtype=torch.int32)
    scratch = draw_scratch(1, 600, torch.device("cpu"))
    for logits in (torch.zeros(2, 600), torch.zeros(1, 6000)):
        with pytest.raises(KernelUnsupported, match="no scratch"):
            advance_drawn(logits, some, some, some, some, settings, scratch)
    with pytest.raises(KernelUnsupported, match="float16"):
        advance_drawn(torch.zeros(1, 600).half(), some, some, some, some, settings, scratch)
