"""Products over weights of 8 bits: against float64 of the same roundings, and the same bytes in any company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import arch, compiled
from flowinfer.kernels.int8_linear import Int8Weight, int8_linear, int8_linear_reference

needs_bytes = pytest.mark.skipif(
    bool(compiled.missing() or compiled.missing_feature("avx512vnni")), reason="needs a CPU with AVX512_VNNI, and numba"
)


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def a_weight(panels: int, groups: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(-127, 128, (32 * panels, 32 * groups), dtype=torch.int8)
    return codes, (torch.rand(32 * panels) + 0.1) / 127 / groups**0.5


rows = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 97]))


@needs_bytes
@given(
    rows=rows, panels=st.integers(1, 5), groups=st.sampled_from([1, 2, 3, 18, 48]), has_bias=st.booleans(),
    away=st.sampled_from([0.0, 5.0, -300.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_products_are_right(rows: int, panels: int, groups: int, has_bias: bool, away: float) -> None:
    """Also of numbers that all lie on one side of nought."""
    torch.manual_seed(rows * panels * groups)
    codes, scale = a_weight(panels, groups)
    x = (torch.randn(rows, 32 * groups) + away).bfloat16()
    bias = torch.randn(32 * panels) if has_bias else None
    want = int8_linear_reference(x, codes, scale, bias)
    got = int8_linear(x, Int8Weight(codes, scale, bias))
    # A number in the middle between two codes may go to the other one: a step, times a weight, now and then.
    step = float(x.unflatten(1, (-1, 32)).float().aminmax(dim=-1).max.sub(x.float().amin()).amax() / 254)
    torch.testing.assert_close(got.double(), want, atol=2 * step * float(scale.max()) * 127 + 1e-2, rtol=1e-2)


@needs_bytes
def test_rounding_costs_less_than_a_hundredth_of_a_product() -> None:
    codes, scale = a_weight(3, 18)
    x = torch.randn(50, 576).bfloat16()
    x[:, ::97] *= 20  # channels that stick out, as models have them
    exact = x.double() @ codes.double().t() * scale.double()
    error = int8_linear(x, Int8Weight(codes, scale)).double() - exact
    assert float(error.norm() / exact.norm()) < 0.01


@needs_bytes
@given(rows=rows, start=st.integers(0, 50), count=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_bytes_beside_any_others(rows: int, start: int, count: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 96).bfloat16(), Int8Weight(*a_weight(5, 3))
    whole = int8_linear(x, weight)
    some = slice(start % rows, start % rows + count)
    torch.set_num_threads(2)
    assert torch.equal(int8_linear(x[some].contiguous(), weight), whole[some])


@needs_bytes
def test_equal_numbers_zeros_and_nan() -> None:
    codes, scale = a_weight(1, 2)
    x = torch.zeros(4, 64).bfloat16()
    x[1], x[2, :32] = 3.0, -7.0
    x[3, 5] = float("nan")
    got = int8_linear(x, Int8Weight(codes, scale))
    torch.testing.assert_close(got[:3].double(), int8_linear_reference(x[:3], codes, scale), atol=1e-2, rtol=1e-2)
    assert bool(got[3].isnan().all()) and not bool(got[:3].isnan().any())
    assert int8_linear(x[:0], Int8Weight(codes, scale)).shape == (0, 32)


@needs_bytes
def test_rows_of_another_kind_are_refused() -> None:
    weight = Int8Weight(*a_weight(1, 1))
    for x in (torch.randn(2, 32), torch.randn(2, 30).bfloat16(), torch.randn(32, 2).bfloat16().t()):
        with pytest.raises(KernelUnsupported, match="contiguous bfloat16 rows of 32 numbers"):
            int8_linear(x, weight)


@pytest.mark.parametrize("shape", [(33, 32), (32, 48)])
def test_weights_that_have_no_tiles_say_why(shape: tuple[int, int]) -> None:
    with pytest.raises(KernelUnsupported, match="multiples of 32 rows out and of 32 columns"):
        Int8Weight(torch.zeros(shape, dtype=torch.int8), torch.ones(shape[0]))


def test_processors_that_lack_the_instruction_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "missing_feature", lambda feature: f"a processor with {arch.FEATURES[feature]}")
    with pytest.raises(KernelUnsupported, match="needs a processor with AVX512_VNNI"):
        Int8Weight(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32))
    assert arch.missing(arch.BY_OP["int8_linear"], None, "bfloat16") == "a processor with AVX512_VNNI"
