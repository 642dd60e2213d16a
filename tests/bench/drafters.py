"""Drafters for tests: one that knows the answers and errs as often as it is told, and lengths by chance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowinfer.engine import hub
from flowinfer.engine.batch import Batch
from flowinfer.engine.draft import DraftHead, HeadConfig
from flowinfer.message import Ids
from flowinfer.stages.spec_verify import stage
from flowinfer.stages.spec_verify.drafts import Choose, Guesses, Ran

if TYPE_CHECKING:
    import pytest

# Ways to choose tokens that requests may ask for.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"logprobs": 2},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_tokens": 5, "ignore_eos": False},
    {"logit_bias": {5: 2.0}},
]


def save_random_head(model: Path, file: Path, **sizes: Any) -> None:
    """An untrained head for this model: its drafts are worthless."""
    info = hub.describe(model)
    config = HeadConfig(
        target="random",
        hidden_size=info.config.hidden_size,
        vocab_size=info.config.vocab_size,
        feature_layers=(1, 0),
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        ffn_size=32,
        digest=info.digest,
        **sizes,
    )
    embed = torch.zeros(info.config.vocab_size, info.config.hidden_size)
    DraftHead.random(config, embed, embed, "cpu", torch.float32).save(file)


class Cheat:
    """Drafts what each request will say, by its id, with a wrong token now and then."""

    needs_features: tuple[int, ...] = ()
    needs_host = True
    calibrated = False

    def __init__(self, batch: Batch, answers: dict[str, list[int]], *, block: int = 8, wrong: float = 0.2) -> None:
        self.block = block
        self._batch, self._answers, self._wrong = batch, answers, wrong
        self._random = np.random.default_rng(0)
        self.num_rows = 0

    def join(self, slot: int) -> None:
        """Knows all."""

    def leave(self, slot: int) -> None:
        """Knows all."""

    def observe(self, ran: Ran) -> None:
        """Checks that what is said to be history is."""
        assert (self._batch.tokens[ran.slots, ran.positions] == ran.tokens).all()
        self.num_rows += ran.slots.size

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose) -> Guesses:
        tokens = np.zeros((slots.size, self.block), np.int32)
        for i, slot in enumerate(slots.tolist()):
            at = int(num_tokens[i] - self._batch.num_prompt[slot])
            known = self._answers[self._batch.ids[slot] or ""][at : at + self.block]
            tokens[i, : len(known)] = known
        wrong = self._random.random(tokens.shape) < self._wrong
        tokens[wrong] = (tokens[wrong] + 1) % self._batch.vocab_size
        confidences = self._random.random(tokens.shape, np.float32)
        return Guesses(self._random.random(slots.size) < 0.9, tokens, confidences)


class RandomLength:
    """Verifies as many as chance says."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(1)

    def looks(self, acceptance: NDArray[np.float64], step: int) -> bool:
        return step % 5 != 0

    def choose(self, confidences: NDArray[np.float64], limits: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._random.integers(0, limits + 1)

    def timed(self, num_rows: int, seconds: float, context: float, *, plain: bool) -> None:
        assert num_rows > 0 and seconds > 0

    def drafted(self, num_sequences: int, seconds: float) -> None:
        assert num_sequences > 0


def cheat(patch: pytest.MonkeyPatch, answers: dict[str, list[int]], *, lengths: str = "fixed", **options: Any) -> None:
    """From now on every spec-verify that drafts does so by a Cheat."""
    patch.setattr(stage, "make_drafter", lambda config, batch: Cheat(batch, answers, **options))
    if lengths == "random":
        patch.setattr(stage, "make_schedule", lambda config, batch, may_measure: RandomLength())
