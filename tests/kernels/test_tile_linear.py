"""Products in tiles of bfloat16 pairs: against float64 over odd sizes, and the same bytes in any company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import arch, compiled, tile_linear
from flowinfer.kernels.tile_linear import TileWeight, tile_linear_reference

needs_pairs = pytest.mark.skipif(
    bool(compiled.missing() or compiled.missing_pairs()), reason="needs a CPU with AVX512_BF16, and numba"
)


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


rows = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 97, 300]))


@needs_pairs
@given(rows=rows, panels=st.integers(1, 5), pairs=st.one_of(st.integers(1, 40), st.just(700)), has_bias=st.booleans())
@settings(max_examples=60, deadline=None)
def test_products_are_right(rows: int, panels: int, pairs: int, has_bias: bool) -> None:
    torch.manual_seed(rows * panels * pairs)
    x, weight = torch.randn(rows, 2 * pairs).bfloat16(), (torch.randn(64 * panels, 2 * pairs) / pairs**0.5).bfloat16()
    bias = torch.randn(64 * panels).bfloat16() if has_bias else None
    want = tile_linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    got = tile_linear.tile_linear(x, TileWeight(weight, bias))
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-2)


@needs_pairs
@given(rows=rows, start=st.integers(0, 50), count=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_bytes_beside_any_others(rows: int, start: int, count: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 96).bfloat16(), TileWeight(torch.randn(192, 96).bfloat16())
    whole = tile_linear.tile_linear(x, weight)
    some = slice(start % rows, start % rows + count)
    torch.set_num_threads(2)
    assert torch.equal(tile_linear.tile_linear(x[some].contiguous(), weight), whole[some])


@needs_pairs
def test_nan_stays_in_its_row_and_no_rows_give_no_rows() -> None:
    x, weight = torch.randn(9, 32).bfloat16(), TileWeight(torch.randn(64, 32).bfloat16())
    x[4, 7] = float("nan")
    nan_rows = tile_linear.tile_linear(x, weight).isnan()
    assert nan_rows.any(1).tolist() == nan_rows.all(1).tolist() == [row == 4 for row in range(9)]
    assert tile_linear.tile_linear(x[:0], weight).shape == (0, 64)


@needs_pairs
def test_rows_of_another_kind_are_refused() -> None:
    weight = TileWeight(torch.randn(64, 32).bfloat16())
    for x in (torch.randn(2, 32), torch.randn(2, 30).bfloat16(), torch.randn(32, 2).bfloat16().t()):
        with pytest.raises(KernelUnsupported, match="contiguous bfloat16 rows of 32 numbers"):
            tile_linear.tile_linear(x, weight)


@pytest.mark.parametrize(
    ("shape", "dtype", "lacks"),
    [
        ((64, 32), torch.float32, "bfloat16 on a CPU"),
        ((65, 32), torch.bfloat16, "64 rows"),
        ((64, 31), torch.bfloat16, "even"),
    ],
)
def test_weights_that_have_no_tiles_say_why(shape: tuple[int, int], dtype: torch.dtype, lacks: str) -> None:
    with pytest.raises(KernelUnsupported, match=lacks):
        TileWeight(torch.zeros(shape, dtype=dtype))


def test_processors_that_lack_the_instruction_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "missing_feature", lambda feature: f"a processor with {arch.FEATURES[feature]}")
    with pytest.raises(KernelUnsupported, match="needs a processor with AVX512_BF16"):
        TileWeight(torch.zeros(64, 32, dtype=torch.bfloat16))
    needs = arch.BY_OP["tile_linear"]
    assert arch.missing(needs, None, "bfloat16") == "a processor with AVX512_BF16"
    assert arch.missing(needs, None, "float32") == "bfloat16 (got float32)"
    assert arch.missing(needs, (9, 0), "bfloat16") == "a CPU"
