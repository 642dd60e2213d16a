"""DeepSeek-V4 behind decode graphs, under Triton's interpreter: replays are plain calls, all else is a card's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from v4_cases import DEVICE
from v4_models import write_v4

from flowinfer.bench.service import EngineService
from flowinfer.engine.batch import Batch
from flowinfer.engine.decode_graphs import DecodeGraphs
from flowinfer.engine.engine import Engine
from flowinfer.engine.models.deepseek_v4 import load as loading
from flowinfer.engine.models.linear import Linear
from flowinfer.kernels.decode_attention import Scratch
from flowinfer.kernels.greedy import greedy_scratch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DEVICE != "cpu", reason="tests/engine/test_v4_gpu.py is for cards")]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16, "q_lora_rank": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "o_groups": 2,
    "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 1, "num_hash_layers": 1,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "sliding_window": 8, "qk_rope_head_dim": 8, "hc_sinkhorn_iters": 2, "hc_mult": 2, "max_position_embeddings": 256,
}  # fmt: skip


class Done:
    """A step that has ended."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has come."""
        return True


class Replay:
    def __init__(self, run: Any) -> None:
        self.run = run

    def replay(self) -> None:
        with torch.inference_mode():
            self.run()


class EagerGraphs(DecodeGraphs):
    """Captures nothing; state by slot, kernels and the model are those of a card."""

    def __init__(self, model: Any, kv: torch.Tensor, batch: Batch) -> None:
        self._start(model, kv, batch)
        self.scratch = Scratch.make(self.sizes[-1], model.heads, model.device)
        self._greedy = greedy_scratch(self.sizes[-1], model.config.vocab_size, model.device)

    def captured(self, run: Any) -> Any:
        return Replay(run)

    def event(self) -> Any:
        return Done()


def answers(folder: Path, verify: dict[str, Any] | None = None) -> list[list[int]]:
    """Four greedy tokens behind two prompts that repeat themselves."""
    made = np.random.default_rng(3)
    prompts = [np.tile(made.integers(3, 60, 5), 2)[:length].astype(np.int32) for length in (5, 9)]
    service = EngineService(
        str(folder), device="cpu", dtype="float32", num_blocks=16, max_batch=2, max_tokens=64, chunk=64, verify=verify
    )
    service.client.outputs = {}
    service.answer(prompts, max_tokens=4)
    found = [service.client.outputs[id] for id in service.sent]
    service.close()
    return found


def test_answers_are_those_of_the_plain_model_with_drafts_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_v4(tmp_path, SIZES)
    wanted = answers(tmp_path)
    started = []

    def decode_graphs(engine: Engine, batch: Batch) -> DecodeGraphs:
        graphs = EagerGraphs(engine.model, engine.kv, batch)
        graphs.capture()
        started.append(type(engine.model).__name__)
        return graphs

    monkeypatch.setattr(loading, "_can_fuse", lambda device, dtype: True)
    monkeypatch.setattr(loading, "make_linear", Linear)
    monkeypatch.setattr(Engine, "decode_graphs", decode_graphs)
    drafting = {"draft": "ngram", "tokens": 2, "schedule": "fixed", "ngram_min": 1}
    assert answers(tmp_path) == answers(tmp_path, drafting) == wanted
    assert started == ["FusedV4", "FusedV4"]
