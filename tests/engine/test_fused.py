"""The fused decoder on a GPU gives the same logits by each of its ways through a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flowinfer.bench.service import EngineService
from flowinfer.engine.decode_graphs import BOOKED
from flowinfer.engine.models import load_model
from flowinfer.engine.models.named import CONFIGS, RANDOM
from flowinfer.engine.step import StepInput

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000}
SHAPES = {
    "dense": CONFIGS["qwen3-8b"] | SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "experts": CONFIGS["qwen3-30b-a3b"]
    | SMALL
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 128}
    | {"num_experts": 16, "num_experts_per_tok": 4},
}
TOKENS = 1500  # more than the expert kernels take at once, and enough for torch's attention


def run(
    model: object, kv: torch.Tensor, tokens: list[int], start: int, table: np.ndarray, *, rows: bool
) -> torch.Tensor:
    step = StepInput(
        tokens=torch.tensor(tokens, device="cuda"),
        positions=torch.arange(start, start + len(tokens), device="cuda"),
        query_starts=np.array([0, len(tokens)], np.int32),
        kv_lens=np.array([start + len(tokens)], np.int32),
        block_tables=table,
        logit_rows=torch.tensor([len(tokens) - 1], device="cuda") if rows else None,
    )
    return model.forward(step, kv)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_in_one_step_in_chunks_and_then_a_token(shape: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape] | {RANDOM: True}))
    model = load_model(tmp_path, dtype="bfloat16", device="cuda:0")
    config = model.config
    blocks = -(-TOKENS // 64) + 1
    table = np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
    ids = np.random.default_rng(1).integers(3, 1000, TOKENS).tolist()
    outs = []
    for cuts in ([TOKENS], [TOKENS - 1, 1], [700, 500, 37, TOKENS - 1237]):
        kv = torch.full(
            (blocks, config.num_layers, 2, config.num_kv_heads, 64, config.head_dim), float("nan"),
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        start = 0
        for count in cuts:
            last = start + count == TOKENS
            logits = run(model, kv, ids[start : start + count], start, table, rows=last)
            start += count
        outs.append(logits.float().cpu())
    for other in outs[1:]:
        assert (other - outs[0]).norm() < 3e-2 * outs[0].norm()


def test_rows_of_experts_are_counted_in_graphs_and_out_of_them(tmp_path: Path) -> None:
    """Decode steps in graphs are booked several at a time, late; padding to a graph's size isn't."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["experts"] | {RANDOM: True}))
    service = EngineService(
        str(tmp_path), device="cuda:0", dtype="bfloat16", num_blocks=64, max_batch=8, max_tokens=256, chunk=512
    )
    assert service.decode.overlap is not None
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (40, 50, 60)]
    service.answer(prompts, max_tokens=30)
    service.answer(prompts[:1], max_tokens=1)
    load = service.engine.expert_load
    prefill, decode = (load.windows[phase] for phase in ("prefill", "decode"))
    top, layers = 4, 3
    assert prefill.num_rows == top * (layers - 1) * (39 + 49 + 59 + 39), "the last layer is for logits"
    rows = decode.recent().sum((1, 2))
    assert set(rows.tolist()) <= {top * layers * running for running in (1, 2, 3)}
    assert 30 - 2 * BOOKED <= decode.num_steps <= 33 and decode.num_steps % BOOKED == 0
    assert rows.sum() == decode.num_rows >= top * layers * (3 * decode.num_steps - 2 * 3)
    service.close()
