"""DeepSeek-V4 by its GPU kernels, under Triton's interpreter: the logits of the CPU model in every kind of step.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run compiled on a card.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from v4_models import write_v4

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.deepseek_v4 import load as loading
from flowinfer.engine.models.linear import Linear
from flowinfer.engine.step import Features, StepInput
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.draw import SlotSettings
from flowinfer.kernels.verify import Rows

DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16, "q_lora_rank": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "o_groups": 2,
    "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 1, "num_hash_layers": 1,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "sliding_window": 8, "max_position_embeddings": 512, "hc_sinkhorn_iters": 2, "hc_mult": 2, "qk_rope_head_dim": 8,
}  # fmt: skip
BLOCKS, LENGTH = 6, 80
LONG = pytest.param(60, marks=pytest.mark.slow)  # tokens before those that are decoded: beyond a block's end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_v4(tmp_path_factory.mktemp("v4"), SIZES)


class Runner:
    """A model over an arena whose block table is shuffled."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, device = model, model.device
        self.table = np.array([[4, 1, 5]], np.int32)
        self.kv = torch.full((BLOCKS, *hub.describe(folder).layout("float32").block_shape), 7.0, device=device)

    def run(self, tokens: np.ndarray, start: int, count: int, features: Features | None = None) -> Tensor:
        device = self.model.device
        step = StepInput(
            tokens=torch.from_numpy(tokens[start : start + count]).to(device),
            positions=torch.arange(start, start + count, device=device),
            query_starts=np.array([0, count], np.int32),
            kv_lens=np.array([start + count], np.int32),
            block_tables=self.table,
            logit_rows=torch.arange(count, device=device),
            features=features,
        )
        with torch.inference_mode():
            logits: Tensor = self.model.forward(step, self.kv)
        return logits.cpu()

    def batch(self, length: int) -> DecodeBatch:
        """Slot 1 holds the sequence; rows in front of it and behind are padding."""
        lengths = torch.tensor([1, length], dtype=torch.int32, device=self.model.device)
        tables = torch.from_numpy(np.concatenate([self.table * 0, self.table])).to(self.model.device)
        return DecodeBatch(torch.tensor([-1, 1], dtype=torch.int32, device=self.model.device), lengths, tables)

    @property
    def scratch(self) -> Scratch:
        return Scratch.make(8, self.model.heads, self.model.device)


def fused(folder: Path, monkeypatch: pytest.MonkeyPatch, *, invariant: bool = False) -> Runner:
    monkeypatch.setattr(loading, "_can_fuse", lambda device, dtype: True)
    monkeypatch.setattr(loading, "make_linear", Linear)
    if DEVICE == "cpu" and invariant:  # each program costs a millisecond here
        from flowinfer.engine.models import fused_invariant
        from flowinfer.engine.models.load import Invariance

        monkeypatch.setattr(fused_invariant, "_CASES", ((0, 1), (60, 16)))
        monkeypatch.setattr(fused_invariant, "same_when_wide", lambda weight: False)
        monkeypatch.setattr(Invariance, "__init__", lambda self, *_: None)
    model = load_model(folder, dtype="float32", device=DEVICE, batch_invariant=invariant)
    assert type(model).__name__ == "FusedV4"
    return Runner(model, folder)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(2, 64, LENGTH)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float().cpu(), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("start", [5, LONG])
def test_prompts_in_chunks_then_tokens_then_drafts(
    folder: Path, tokens: np.ndarray, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = start + start // 5
    wanted = Runner(load_model(folder, dtype="float32"), folder).run(tokens, 0, decoded + 5)
    run = fused(folder, monkeypatch)
    close(torch.cat([run.run(tokens, 0, start - 3), run.run(tokens, start - 3, 3)]), wanted[:start])
    with torch.inference_mode():
        for at in range(start, decoded):
            last = torch.tensor([0, tokens[at]], dtype=torch.int32, device=DEVICE)
            chosen: list[Tensor] = []
            logits = run.model.decode(last, run.batch(at + 1), run.kv, run.scratch, chosen)
            close(logits[1:], wanted[at : at + 1])
        assert [list(ids.shape) for ids in chosen] == [[2, 2]] * 2
        at = decoded  # three rows of a sequence; those of padding come first
        ids = torch.tensor([-1, -1, -1, 3, 4, 5], dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor([0, 0, 0, at + 1, at + 2, at + 3], dtype=torch.int32, device=DEVICE)
        drafts = torch.from_numpy(np.concatenate([[0, 0, 0], tokens[at : at + 3]]).astype(np.int32)).to(DEVICE)
        counts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
        rows = Rows(counts, drafts, ids, lengths, SlotSettings.make(6, torch.device(DEVICE)))
        logits = run.model.verify(rows, run.batch(at + 1), run.kv, run.model.verify_scratch(2, 3))
        close(logits[3:], wanted[at : at + 3])
    close(run.run(tokens, decoded + 3, 2), wanted[-2:])


def test_features_and_rows_of_experts(folder: Path, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, run = Runner(load_model(folder, dtype="float32"), folder), fused(folder, monkeypatch)
    given = [Features((0, 1)), Features((0, 1))]
    for one, features in zip((plain, run), given, strict=True):
        one.run(tokens, 0, 2, features)
    close(given[1].joined(), given[0].joined())
    assert torch.equal(run.model.expert_load_LE.cpu(), plain.model.expert_load_LE)


@pytest.mark.parametrize("start", [7, LONG])
def test_a_token_has_the_same_bytes_in_every_kind_of_step(
    folder: Path, tokens: np.ndarray, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fused(folder, monkeypatch, invariant=True)
    end = start + 1 + start // 10
    whole = run.run(tokens, 0, end)
    kv = run.kv.clone()
    run.kv.fill_(3.0)
    assert torch.equal(torch.cat([run.run(tokens, 0, 3), run.run(tokens, 3, start - 3)]), whole[:start])
    with torch.inference_mode():
        for at in range(start, end):
            last = torch.tensor([0, tokens[at]], dtype=torch.int32, device=DEVICE)
            logits = run.model.decode(last, run.batch(at + 1), run.kv, run.scratch)
            assert torch.equal(logits[1].cpu(), whole[at])
    written = kv != 7.0
    assert written.any() and torch.equal(run.kv[written], kv[written])
