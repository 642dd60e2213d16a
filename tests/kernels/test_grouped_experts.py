"""Products of experts over blocks of rows: the layout anywhere, the products on a Hopper card, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import arch, grouped_experts
from flowinfer.kernels import experts as layer
from flowinfer.kernels.experts import experts, experts_reference, route_reference
from flowinfer.kernels.grouped_experts import (
    Blocks,
    down_rows,
    down_rows_reference,
    fits,
    gated_rows,
    gated_rows_reference,
    lay_out,
    lay_out_reference,
)
from flowinfer.kernels.grouped_experts.products import LIBRARY, Products, name_of

pytest.importorskip("triton")
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
HIDDEN, WIDTH, EXPERTS, TOP = 512, 256, 16, 4


def chosen(tokens: int, num_experts: int, top: int, seed: int = 0, skew: float = 0.0) -> torch.Tensor:
    """Distinct experts for each token; with skew the first ones are liked more."""
    generator = torch.Generator().manual_seed(seed)
    liked = torch.randn(tokens, num_experts, generator=generator) - skew * torch.arange(num_experts)
    return liked.topk(top, -1).indices.int()


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 90), st.integers(1, 9), st.sampled_from([16, 128]), st.integers(0, 99), st.booleans())
def test_pairs_of_an_expert_fill_its_blocks_in_order(
    tokens: int, num_experts: int, block_rows: int, seed: int, skewed: bool
) -> None:
    top = min(num_experts, 3)
    ids = chosen(tokens, num_experts, top, seed, skew=2.0 * skewed)
    got = lay_out(ids.to(DEVICE), num_experts, block_rows=block_rows)
    place, owner, counts = lay_out_reference(ids, num_experts, block_rows)
    assert torch.equal(got.place.cpu(), place) and torch.equal(got.counts.cpu(), counts)
    assert int(got.num_blocks) == len(owner) <= len(got.owner)
    assert torch.equal(got.owner[: len(owner)].cpu(), owner)
    tokens_of_rows = torch.zeros_like(got.tokens.cpu())
    tokens_of_rows[place.long()] = torch.arange(ids.numel(), dtype=torch.int32) // top
    assert torch.equal(got.tokens.cpu(), tokens_of_rows)


def test_what_the_products_do_not_take_is_refused() -> None:
    blocks = lay_out(chosen(5, 4, 2).to(DEVICE), 4)
    x, gate_up = torch.zeros(5, 256, device=DEVICE), torch.zeros(4, 512, 256, device=DEVICE)
    with pytest.raises(KernelUnsupported, match="bfloat16"):
        gated_rows(x, gate_up, blocks)
    with pytest.raises(KernelUnsupported, match="whole tiles") as caught:
        gated_rows(x.bfloat16()[:, :192].contiguous(), gate_up.bfloat16()[:, :, :192].contiguous(), blocks)
    assert "256" in caught.value.help and not fits(192, 256) and not fits(256, 128) and fits(256, 384)
    with pytest.raises(KernelUnsupported, match="contiguous"):
        gated_rows(x.bfloat16(), gate_up.bfloat16().mT.contiguous().mT, blocks)
    with pytest.raises(KernelUnsupported, match="5 rows"):
        down_rows(torch.zeros(5, 256).bfloat16(), torch.zeros(4, 256, 256).bfloat16(), blocks)
    with pytest.raises(KernelUnsupported, match="int32"):
        lay_out(torch.zeros(2, 2, dtype=torch.int64), 4)


def test_only_hopper_with_the_package_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = arch.BY_OP["grouped_experts"]
    monkeypatch.setattr(arch, "has_triton", lambda: True)
    monkeypatch.setattr(arch, "has_cute", lambda: True)
    assert not arch.missing(needs, (9, 0), "bfloat16")
    assert "9.x" in arch.missing(needs, (10, 0), "bfloat16") and "9.0" in arch.missing(needs, (8, 0), "bfloat16")
    monkeypatch.setattr(arch, "has_cute", lambda: False)
    assert arch.missing(needs, (9, 0), "bfloat16") == "the package nvidia-cutlass-dsl"


@pytest.mark.parametrize(
    ("here", "width", "taken"),
    [
        ({"grouped_experts", "grouped_mm"}, 256, "_by_blocks"),
        ({"grouped_experts", "grouped_mm"}, 320, "_by_grouped_mm"),
        ({"grouped_mm"}, 256, "_by_grouped_mm"),
    ],
)
def test_a_layer_takes_what_runs_and_fits(
    monkeypatch: pytest.MonkeyPatch, here: set[str], width: int, taken: str
) -> None:
    monkeypatch.setattr(layer, "MOST_ROWS", 2)
    monkeypatch.setattr(layer, "_runs", lambda op, x: op in here)
    monkeypatch.setattr(grouped_experts, "ready", lambda *_: True)
    for name in ("_by_blocks", "_by_grouped_mm"):
        monkeypatch.setattr(layer, name, lambda *_, name=name: name)
    x, logits = torch.zeros(3, 256, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    gate_up, down = torch.zeros(4, 2 * width, 256), torch.zeros(4, 256, width)
    assert experts(x, logits, gate_up, down, x, 2, norm_topk=True) == taken


def test_what_does_not_compile_is_told_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: int) -> None:
        raise TypeError("no such operand")

    monkeypatch.setattr(grouped_experts, "prepare", broken)
    grouped_experts.ready.cache_clear()
    assert not grouped_experts.ready(256, 256, 4) and not grouped_experts.ready(256, 256, 4)
    assert [record.getMessage().count("no such operand") for record in caplog.records] == [1]
    grouped_experts.ready.cache_clear()


def test_a_library_that_lacks_a_product_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY, "/nowhere/products.so")
    with pytest.raises(KernelUnsupported, match=r"/nowhere/products\.so"):
        Products(256, 128, 4)
    monkeypatch.setenv(LIBRARY, "libc.so.6")
    with pytest.raises(KernelUnsupported, match=name_of(256, 128, 4, True)) as caught:
        Products(256, 128, 4)
    assert "build" in caught.value.help


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("nvidia_cutlass_dsl") and which("gcc")), reason="needs nvidia-cutlass-dsl and gcc")
def test_a_library_is_built_without_a_card(tmp_path: Path) -> None:
    made = tmp_path / "products.so"
    build = [sys.executable, "-m", "flowinfer.kernels.grouped_experts.build", "--size", "256", "256", "4", str(made)]
    subprocess.run(build, check=True)
    assert all(name_of(*size).encode() in made.read_bytes() for size in ((256, 256, 4, True), (256, 256, 4, False)))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    got, want = got.double(), want.double()
    assert got.isfinite().all()
    assert ((got - want).norm() / want.norm()).item() < 5e-3


def needs_card() -> str:
    """What keeps the products from running here; empty where nothing does."""
    if not torch.cuda.is_available():
        return "a CUDA device"
    return arch.missing(arch.BY_OP["grouped_experts"], arch.capability_of("cuda:0"), "bfloat16")


on_a_card = pytest.mark.skipif(bool(needs_card()), reason=f"needs {needs_card()}")


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("tokens", [1, 77, 1500])
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_products_on_a_card(tokens: int, skew: float) -> None:
    generator = torch.Generator(device="cuda").manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") / shape[-1] ** 0.5).bfloat16()

    x = random(tokens, HIDDEN) * HIDDEN**0.5
    gate_up, down = random(EXPERTS, 2 * WIDTH, HIDDEN), random(EXPERTS, HIDDEN, WIDTH)
    ids = chosen(tokens, EXPERTS, TOP, seed=tokens, skew=skew).cuda()
    blocks: Blocks = lay_out(ids, EXPERTS)
    h = gated_rows(x, gate_up, blocks)
    near(h[blocks.place.long()], gated_rows_reference(x.double(), ids, gate_up.double()))
    y = down_rows(h, down, blocks)
    near(y[blocks.place.long()], down_rows_reference(h[blocks.place.long()].double(), ids, down.double()))


@pytest.mark.gpu
@on_a_card
def test_a_whole_layer_on_a_card() -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    x = torch.randn(1100, HIDDEN, generator=generator, device="cuda").bfloat16()
    gate_up = (torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator, device="cuda") / HIDDEN**0.5).bfloat16()
    down = (torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator, device="cuda") / WIDTH**0.5).bfloat16()
    logits = torch.randn(1100, EXPERTS, generator=generator, device="cuda").bfloat16()
    load = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    ids, weights = route_reference(logits.double(), TOP, norm_topk=True)
    want = experts_reference(x.double(), ids, weights, gate_up.double(), down.double(), torch.zeros_like(x).double())
    got = experts(x, logits, gate_up, down, torch.zeros_like(x), TOP, norm_topk=True, load_E=load)
    near(got, want)
    assert torch.equal(load, ids.flatten().long().bincount(minlength=EXPERTS).int())
