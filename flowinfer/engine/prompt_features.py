"""What a draft head here wants of prompts: the output of some layers at their last tokens, kept with their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flowinfer.engine.held import LastFeatures, Run
from flowinfer.engine.step import Features
from flowinfer.message import Ids


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
