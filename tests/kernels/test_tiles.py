"""Weighted sums of rows as they lie: right, and of an odd number the bytes that a zero weight more would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.kernels import compiled

if compiled.missing() or compiled.missing_pairs():
    pytest.skip("needs a CPU with AVX512_BF16, and numba", allow_module_level=True)

from numba import carray

from flowinfer.kernels import tiles
from flowinfer.kernels.loops import kernel

ROWS, COLUMNS = 3, tiles.COLUMNS
_add_rows = tiles.add_rows(ROWS)


@kernel
def _add(arguments):  # type: ignore[no-untyped-def]
    weights, apart, values, count, out = carray(arguments, 5)
    _add_rows(weights, apart, values, 2 * 64, count, out, 4 * 64, values)


def added(weights: torch.Tensor, values: torch.Tensor, count: int, out: torch.Tensor) -> torch.Tensor:
    sums = out.clone()
    _add(weights, 2 * weights.shape[1], values, count, sums, work=1)
    return sums


@given(count=st.integers(1, 70), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_sums_of_an_odd_number_are_those_with_a_zero_more(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(ROWS, 72).bfloat16()
    weights[:, :count] = torch.randn(ROWS, count, generator=generator).bfloat16()
    values = torch.randn(72, COLUMNS, generator=generator).bfloat16()
    out = torch.randn(ROWS, COLUMNS, generator=generator) * 100
    got = added(weights, values, count, out)
    torch.testing.assert_close(
        got.double(), out.double() + weights[:, :72].double() @ values.double(), rtol=1e-5, atol=1e-4
    )
    assert torch.equal(got, added(weights, values, (count + 1) // 2 * 2, out))
    values[count:] = float("nan")  # nobody has written there
    assert torch.equal(got, added(weights, values, count, out))
