"""Products of FP8 weights under Triton's interpreter, over odd shapes, against float64 references.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run compiled on a card.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.experts import bucket, route
from flowinfer.kernels.fp8_experts import (
    fp8_experts,
    fp8_experts_reference,
    fp8_gather_gated,
    fp8_weighted,
)
from flowinfer.kernels.fp8_linear import (
    FEW_ROWS,
    Fp8Weight,
    fp8_linear,
    fp8_linear_reference,
    fp8_product,
    fp8_skinny,
    quantize_rows,
    quantize_rows_reference,
    quantize_weight,
    tiles,
)

interpreter = pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = [(1, 128, 48), (3, 576, 40), (17, 200, 34), (40, 256, 132)]  # rows, columns in, columns out


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(BF16).to(DEVICE)


def weight(size_out: int, size_in: int, seed: int = 0) -> Fp8Weight:
    return quantize_weight(random(size_out, size_in, seed=seed) * 0.1)


def finer(of: Fp8Weight, rows: int) -> Fp8Weight:
    """The same weight with each scale written down for every so many rows."""
    scale = of.scale.repeat_interleave(of.rows // rows, 0)[: -(-of.codes.shape[0] // rows)]
    return Fp8Weight(of.codes, scale.contiguous(), rows)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_meet_the_numbers_that_the_codes_stand_for(shape: tuple[int, int, int]) -> None:
    _, size_in, size_out = shape
    rows = min(shape[0], FEW_ROWS)
    x, w, bias = random(rows, size_in), weight(size_out, size_in), random(size_out, seed=3)
    want = fp8_linear_reference(x.double(), *w, bias_O=bias.double())
    assert error(fp8_skinny(x, w, bias_O=bias), want) < 5e-3
    assert error(fp8_linear(x, finer(w, 32), bias_O=bias), want) < 5e-3
    want = fp8_linear_reference(x.double(), *w, gated=True)
    assert error(fp8_skinny(x, w, gated=True), want) < 1e-2


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_the_columns_sum_to_the_whole(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "skinny_parts", lambda *sizes: parts)
    monkeypatch.setattr(tiles, "product_parts", lambda *sizes: parts)
    x, w, bias = random(5, 576), weight(40, 576), random(40, seed=3)
    got = fp8_skinny(x, w, bias_O=bias, split=True)
    assert got.shape == (5 * parts, 40) and got.dtype is torch.float32
    want = fp8_linear_reference(x.double(), *w, bias_O=bias.double())
    assert error(got.view(5, parts, 40).sum(1), want) < 2e-3
    got = fp8_product(quantize_rows(x), w, bias_O=bias, split=True).view(5, parts, 40).sum(1)
    assert (
        error(got, fp8_linear_reference(x.double(), *w, bias_O=bias.double(), quantized=True)) < 2e-3
    )  # FP8 units sum 14 bits


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_become_what_the_reference_makes_of_them(shape: tuple[int, int, int]) -> None:
    rows, size_in, _ = shape
    x = random(rows, size_in) * torch.logspace(-6, 3, rows, device=DEVICE).unsqueeze(1).to(BF16)
    x[0, :128] = 0
    codes, scale = quantize_rows(x)
    want_codes, want_scale = quantize_rows_reference(x)
    torch.testing.assert_close(scale, want_scale)
    assert (codes.view(torch.uint8) != want_codes.view(torch.uint8)).float().mean() < 1e-3
    both = random(rows, 2 * size_in)
    gate, up = both.double().chunk(2, -1)
    gated = quantize_rows(both, gated=True)
    spread = gated.scale.repeat_interleave(128, 1)[:, :size_in]
    assert error(gated.codes.float() * spread, torch.nn.functional.silu(gate) * up) < 4e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_many_rows_are_multiplied_in_fp8(shape: tuple[int, int, int]) -> None:
    rows, size_in, size_out = shape
    x, w = random(rows, size_in), weight(size_out, size_in)
    want = fp8_linear_reference(x.double(), *w, quantized=True)
    assert error(fp8_product(quantize_rows(x), w), want) < 5e-3
    assert error(fp8_product(quantize_rows(x), finer(w, 64)), want) < 5e-3


def test_the_number_of_rows_chooses() -> None:
    few, many, w = random(FEW_ROWS, 128), random(FEW_ROWS + 1, 128), weight(32, 128)
    assert error(fp8_linear(few, w), fp8_linear_reference(few.double(), *w)) < 5e-3
    assert error(fp8_linear(many, w), fp8_linear_reference(many.double(), *w, quantized=True)) < 5e-3


def test_every_code_is_widened_to_its_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0
    codes = codes.view(2, 128).repeat(32, 1).view(E4M3).to(DEVICE)
    x = torch.eye(128, dtype=BF16, device=DEVICE)[:FEW_ROWS]
    got = fp8_skinny(x.contiguous(), Fp8Weight(codes, torch.ones(1, 1, device=DEVICE)))
    assert torch.equal(got.float(), codes.float().t()[:FEW_ROWS])


def test_a_block_of_zeros_and_one_of_large_numbers() -> None:
    plain = torch.zeros(256, 256)
    plain[128:, 128:] = 3e4
    plain[130, 130] = -6e4
    wide = quantize_weight(plain).wide(torch.float32)
    torch.testing.assert_close(wide, plain, rtol=0.07, atol=0)
    assert float(wide[130, 130]) == -6e4 and not wide[:128].any()


def test_what_doesnt_fit_is_refused() -> None:
    w = weight(32, 128)
    with pytest.raises(KernelUnsupported, match="up to 16 rows"):
        fp8_skinny(random(17, 128), w)
    with pytest.raises(KernelUnsupported, match="float32"):
        fp8_linear(random(2, 128).float(), w)
    with pytest.raises(KernelUnsupported, match="rows of 128 columns"):
        fp8_linear(random(2, 256), w)
    with pytest.raises(KernelUnsupported, match="scales of shape"):
        fp8_linear(random(2, 128), w._replace(rows=16))
    with pytest.raises(KernelUnsupported, match="not two"):
        fp8_skinny(random(2, 128), w, gated=True, split=True)


def stack(num: int, size_out: int, size_in: int) -> Fp8Weight:
    weights = [weight(size_out, size_in, seed=i) for i in range(num)]
    codes = torch.stack([one.codes.view(torch.uint8) for one in weights]).view(E4M3)
    return Fp8Weight(codes, torch.stack([one.scale for one in weights]))


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(1, 128, 32), (4, 136, 24), pytest.param(30, 160, 130, marks=pytest.mark.slow)]
)
def test_experts(tokens: int, hidden: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num, top = 4, 2
    x, logits, residual = random(tokens, hidden), random(tokens, num, seed=1), random(tokens, hidden, seed=2)
    gate_up, down = stack(num, 2 * width, hidden), stack(num, hidden, width)
    ids, weights = route(logits, top, norm_topk=True)
    args = ids, weights.double(), gate_up, down, residual.double()
    want = fp8_experts_reference(x.double(), *args)
    routing = bucket(ids, weights, num)
    y = fp8_weighted(fp8_gather_gated(x, gate_up, routing), down, routing)
    assert error(residual.double() + y.view(tokens, top, hidden).double().sum(1), want) < 1e-2
    load = torch.zeros(num, dtype=torch.int32, device=DEVICE)
    got = fp8_experts(x, logits, gate_up, down, residual.clone(), top, norm_topk=True, load_E=load)
    assert error(got, want) < 1e-2
    monkeypatch.setattr("flowinfer.kernels.fp8_experts.MOST_ROWS", 0)
    got = fp8_experts(x, logits, gate_up, down, residual.clone(), top, norm_topk=True, load_E=load)
    want = fp8_experts_reference(x.double(), *args, quantized=True)
    assert error(got, want) < 2e-2, "a number beside the middle of two codes may go either way"
    assert load.tolist() == (2 * torch.bincount(ids.cpu().flatten(), minlength=num)).tolist()
