"""Training: the twin computes what the engine serves, data keep their licence's rules, a few steps lower the loss."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.deepseek_v4 import ops
from flowinfer.engine.models.deepseek_v4.config import parse_v4
from flowinfer.engine.step import StepInput
from flowinfer.train import run
from flowinfer.train.model import TrainableV4
from flowinfer.train.sinkhorn import sinkhorn

TINY = {
    **run.MINI,
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "qk_rope_head_dim": 8,
    "layer_types": [run.SLIDING, run.SPARSE, run.HEAVY],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "hc_sinkhorn_iters": 5,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def served(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Float32 logits of the engine's own model."""
    layout = hub.describe(folder).layout("float32")
    blocks = layout.blocks_for(len(tokens))
    step = StepInput(
        tokens=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        query_starts=np.array([0, len(tokens)], np.int32),
        kv_lens=np.array([len(tokens)], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logit_rows=torch.arange(len(tokens)),
    )
    model: Any = load_model(folder, dtype="float32")
    with torch.inference_mode():
        return model.forward(step, torch.zeros(blocks, *layout.block_shape))


def test_the_twin_computes_what_is_served(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = TrainableV4(parse_v4(TINY, eos=None)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    save_file({k: v.contiguous() for k, v in model.checkpoint().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    tokens = torch.randint(0, 96, (384,)).tolist()
    rows = torch.tensor([tokens])
    with torch.no_grad():
        mine = model(rows, torch.zeros_like(rows))[0]
    torch.testing.assert_close(mine, served(tmp_path, tokens), rtol=1e-3, atol=1e-3)


def test_documents_dont_see_each_other() -> None:
    """Up to the sparse layer's overlap of one group, so the second one begins at a multiple of 128."""
    torch.manual_seed(4)
    model = TrainableV4(parse_v4(TINY, eos=None)).eval()
    rows = torch.randint(1, 96, (2, 256))
    rows[1, 128:] = rows[0, 128:]
    documents = (torch.arange(256) >= 128).long().expand(2, -1)
    with torch.no_grad():
        alike = model(rows, documents)
        mixed = model(rows, torch.zeros_like(rows))
    heavy = parse_v4({**TINY, "layer_types": [run.SLIDING, run.HEAVY, run.HEAVY]}, eos=None)
    model = TrainableV4(heavy).eval()
    with torch.no_grad():
        exact = model(rows, documents)
    torch.testing.assert_close(exact[0, 128:], exact[1, 128:])
    assert not torch.allclose(mixed[0, 128:], mixed[1, 128:])
    assert (alike[0, 128:] - alike[1, 128:]).abs().max() < (mixed[0, 128:] - mixed[1, 128:]).abs().max()


def test_a_few_steps_lower_the_loss_and_shards_come_out(tmp_path: Path) -> None:
    chat = [0, *range(3, 60), 1]
    for name, times in (("train", 60), ("held_out", 12)):
        starts = np.arange(times, dtype=np.uint32) * len(chat)
        np.savez(tmp_path / f"{name}.npz", tokens=np.array(chat * times, np.uint16), starts=starts)
    args = argparse.Namespace(data=tmp_path, seed=0, lr=1e-2, steps=12, seconds=1e9, batch=2, size=256, every=11)
    args.compile = False
    model, log = run.train(args, parse_v4(TINY, eos=None))
    assert log[-1]["held_out"] < log[0]["held_out"] - 0.5
    assert log[-1]["tokens"] == 12 * 2 * 256
    run.save_shards(model.checkpoint(), tmp_path, most=100_000)
    sizes = [path.stat().st_size for path in tmp_path.glob("weights-*.safetensors")]
    assert len(sizes) > 1 and max(sizes) < 120_000


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_has_the_gradient_of_its_loop(iterations: int) -> None:
    torch.manual_seed(0)
    comb = torch.rand(7, 3, 4, 4) + 0.05
    one, other = comb.clone().requires_grad_(), comb.clone().requires_grad_()
    wanted, mine = ops.sinkhorn(one, iterations, 1e-6), sinkhorn(other, iterations, 1e-6)
    weight = torch.randn_like(comb)
    (wanted * weight).sum().backward()
    (mine * weight).sum().backward()
    torch.testing.assert_close(mine, wanted)
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_sinkhorns_kernels_compute_what_its_loop_does() -> None:
    """In a process of its own: Triton's interpreter is chosen when Triton is imported."""
    code = """if True:
        import torch
        from flowinfer.train import sinkhorn_triton as kernels
        from flowinfer.train.sinkhorn import sinkhorn, sinkhorn_backward
        torch.manual_seed(0)
        comb, grad = torch.rand(70, 4, 4) + 0.05, torch.randn(70, 4, 4)
        for iterations in (1, 2, 20):
            torch.testing.assert_close(kernels.forward(comb, iterations, 1e-6), sinkhorn(comb, iterations, 1e-6))
            mine = kernels.backward(comb, grad, iterations, 1e-6)
            torch.testing.assert_close(mine, sinkhorn_backward(comb, grad, iterations, 1e-6), rtol=1e-4, atol=1e-5)
    """
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
