"""What a draft head wants of prompts: the output of some layers at their last tokens, kept and sent with their KV."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flowinfer.engine import heads
from flowinfer.engine.held import LastFeatures, Run
from flowinfer.engine.step import Features
from flowinfer.errors import ModelError
from flowinfer.message import Ids, LayerRows
from flowinfer.stage import Context


def wanted_elsewhere(ctx: Context, model: str) -> tuple[tuple[int, ...], int]:
    """Layers of this model, and last tokens of a prompt, that the draft head of the graph reads, wherever it runs.

    Where that is another one meanwhile, what is sent isn't taken: speed hangs on it, no token.
    """
    for settings in ctx.settings_of("spec-verify"):
        if settings.get("draft") == "head":
            with contextlib.suppress(ModelError):  # who loads the head says what is wrong with it
                info = heads.read(heads.find(model, settings.get("head", "")))
                return info.feature_layers, info.window
    return (), 0


def packed(last: LastFeatures | None) -> LayerRows | None:
    """As they travel; None where there are none."""
    if last is None or last.rows.numel() * last.rows.element_size() % 4:
        return None
    words: Ids = last.rows.contiguous().flatten().cpu().view(torch.int32).numpy()
    dtype = str(last.rows.dtype).removeprefix("torch.")
    return LayerRows(layers=list(last.layers), end=last.end, count=len(last.rows), dtype=dtype, data=words)


def unpacked(sent: LayerRows, device: torch.device) -> LastFeatures:
    """As they were, on this device."""
    rows = torch.from_numpy(np.array(sent.data)).view(getattr(torch, sent.dtype)).view(sent.count, -1)
    return LastFeatures(tuple(sent.layers), sent.end, rows.to(device))


@dataclass(frozen=True)
class PromptFeatures:
    """Of one prefill step. counts int32 [S]: tokens of each sequence in it, of which the last `kept[i]` are wanted.

    most: tokens that are kept of a prompt.
    """

    features: Features
    kept: Ids
    most: int

    @classmethod
    def wanted(cls, draft: tuple[tuple[int, ...], int], counts: Ids, device: torch.device) -> PromptFeatures | None:
        """What to ask of a step with so many tokens a sequence; None where nobody drafts from features."""
        layers, most = draft
        if not layers:
            return None
        kept = np.minimum(counts, most)
        ends = np.cumsum(counts)
        rows = np.arange(int(kept.sum())) + np.repeat(ends - np.cumsum(kept), kept)
        return cls(Features(layers, torch.from_numpy(rows).to(device)), kept, most)

    def keep(self, runs: Sequence[Run]) -> None:
        """Hands each sequence its rows, behind those of its last chunk."""
        parts = self.features.joined().split(self.kept.tolist())
        for run, part in zip(runs, parts, strict=True):
            end, layers, before = run.start + len(run.tokens), self.features.layers, run.held.features
            if before is not None and before.layers == layers and before.end == end - len(part):
                part = torch.cat((before.rows, part))[-self.most :]
            run.held.features = LastFeatures(layers, end, part.clone())
