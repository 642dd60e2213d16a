"""Rows with drafts through the fused decoder, by its kernels: the logits that the plain decoder gives for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_loop import save_random_llama

from flowinfer.engine.models import linear, load_model
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.models.fused import FusedModel
from flowinfer.engine.models.fused_invariant import InvariantModel
from flowinfer.engine.step import Features, StepInput
from flowinfer.kernels.decode_attention import DecodeBatch
from flowinfer.kernels.draw import SlotSettings
from flowinfer.kernels.verify import Drafted, Rows, spread_rows

pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
ROWS, LENGTHS = 4, [5, 63, 70]


@pytest.mark.parametrize("kind", [FusedModel, InvariantModel])
def test_rows_with_drafts_give_the_logits_of_the_plain_decoder(
    kind: type[FusedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three sequences and a row of padding; one has its drafts over the edge of a block, one ends before them."""
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)  # a fused decoder takes weights as they are
    save_random_llama(tmp_path, 96, 256)
    plain = _of(Model, tmp_path)
    fused = _fused(kind, tmp_path)
    rng = np.random.default_rng(0)
    tables = torch.from_numpy(rng.permutation(9).astype(np.int32)[:6].reshape(3, 2))
    kv = torch.zeros(9, 2, 2, 64, 2, 12)
    texts = [rng.integers(3, 96, length + ROWS).astype(np.int32) for length in LENGTHS]
    counts = np.array([4, 3, 1], np.int32)
    for slot, length in enumerate(LENGTHS):
        if length > 1:
            plain.forward(_step([texts[slot][: length - 1]], [length - 1], tables[slot : slot + 1], rows=False), kv)
    mine = kv.clone().to(DEVICE)
    tokens = [texts[slot][length - 1 : length - 1 + counts[slot]] for slot, length in enumerate(LENGTHS)]
    lens = [length - 1 + int(count) for length, count in zip(LENGTHS, counts, strict=True)]
    step = _step(tokens, lens, tables, rows=True)
    want = plain.forward(step, kv)
    assert want is not None and step.features is not None

    def int32(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    drafts = [texts[slot][length : length + ROWS - 1].tolist() for slot, length in enumerate(LENGTHS)]
    last, lengths = int32([text[length - 1] for text, length in zip(texts, LENGTHS, strict=True)]), int32(LENGTHS)
    limits = int32([200, 66, 71])
    drafted = Drafted(int32(drafts), int32([3, 3, 3]), int32([3, 3, 3]), limits)
    slots, rows = int32([0, 1, -1, 2]), Rows.make(4, ROWS, torch.device(DEVICE))
    spread_rows(slots, last, lengths, drafted, SlotSettings.make(3, last.device), rows)
    features = Features((0, 1))
    out = torch.empty(4 * ROWS, 96, device=DEVICE)
    batch = DecodeBatch(slots, lengths, tables.to(DEVICE))
    with torch.inference_mode():
        fused.verify(rows, batch, mine, fused.verify_scratch(4, ROWS), out=out, features=features)
    real = (rows.ids >= 0).cpu()
    assert rows.counts.tolist() == [4, 3, 0, 1]
    torch.testing.assert_close(out.cpu()[real], want, rtol=1e-3, atol=1e-4)
    for layer, given in step.features.outputs.items():
        torch.testing.assert_close(features.outputs[layer].cpu()[real], given, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(mine.cpu(), kv, rtol=1e-3, atol=1e-4)


def _fused(kind: type[FusedModel], folder: Path) -> FusedModel:
    if DEVICE != "cpu":
        model = load_model(folder, dtype="float32", device=DEVICE, batch_invariant=kind is InvariantModel)
        assert isinstance(model, kind)
        return model
    return _of(kind, folder)


def _of(kind: Any, folder: Path) -> Any:
    """A decoder of this kind on the CPU, whichever one is the fastest there."""
    best: Any = load_model(folder, dtype="float32", device="cpu")
    return kind(best.config, best._embed_VH, best._layers, best._norm_H, best._head_VH, best._rope)


def _step(tokens: list[np.ndarray], lens: list[int], tables: torch.Tensor, *, rows: bool) -> StepInput:
    counts = [len(some) for some in tokens]
    positions = [np.arange(end - count, end) for end, count in zip(lens, counts, strict=True)]
    return StepInput(
        tokens=torch.from_numpy(np.concatenate(tokens)).long(),
        positions=torch.from_numpy(np.concatenate(positions)).long(),
        query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        kv_lens=np.array(lens, np.int32),
        block_tables=tables.numpy(),
        logit_rows=torch.arange(sum(counts)) if rows else None,
        features=Features((0, 1)) if rows else None,
    )
