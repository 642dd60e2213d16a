"""DeepSeek-V4 carries rows of open groups along, which can't be rewound: what rejected drafts leave must do no harm.

A step runs the last token and some drafts; the tokens that really follow are run then, over what the drafts wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_loop import DEVICE, save_random_v4

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.deepseek_v4.config import SPARE_ROWS
from flowinfer.engine.step import StepInput
from flowinfer.stages.moe_decode.stage import MAX_DRAFTS

BEHIND = 6  # tokens that are looked at behind the rejected ones: into the next group of four, and over it
NUM_TOKENS = 280
BOUNDARIES = (4, 8, 124, 128, 132, 252, 256, 260)  # of groups of 4 and 128 and of blocks


class Runner:
    """One sequence over an arena of its own."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder, dtype="float32", device=DEVICE)
        self.layout = hub.describe(folder).layout("float32")
        self.blocks = np.arange(self.layout.blocks_for(NUM_TOKENS + 16), dtype=np.int32)[None]
        self.kv = torch.full((self.blocks.size, *self.layout.block_shape), torch.nan, device=DEVICE)

    @torch.inference_mode()
    def run(self, tokens: list[int], start: int) -> torch.Tensor:
        """Logits of these tokens, which lie behind `start` tokens."""
        end = start + len(tokens)
        step = StepInput(
            tokens=torch.tensor(tokens, device=DEVICE),
            positions=torch.arange(start, end, device=DEVICE),
            query_starts=np.array([0, len(tokens)], np.int32),
            kv_lens=np.array([end], np.int32),
            block_tables=self.blocks,
            logit_rows=torch.arange(len(tokens), device=DEVICE),
        )
        logits = self.model.forward(step, self.kv)
        assert logits is not None
        return logits


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("v4")
    save_random_v4(folder, 96, 512)
    return Runner(folder)


@pytest.fixture(scope="module")
def text(runner: Runner) -> tuple[list[int], torch.Tensor, dict[int, torch.Tensor]]:
    """Tokens, the logits of each, token by token, and the arena before each position."""
    tokens = torch.randint(3, 96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    runner.kv.fill_(0)
    logits, arenas = [], {}
    for position, token in enumerate(tokens):
        arenas[position] = runner.kv.clone()
        logits.append(runner.run([token], position)[0])
    return tokens, torch.stack(logits), arenas


def test_there_is_room_for_all_that_a_step_may_draft() -> None:
    assert SPARE_ROWS >= MAX_DRAFTS


@pytest.mark.parametrize("boundary", (4, 124, 128, 256))
def test_rejected_drafts_leave_the_state_right(runner: Runner, text: Any, boundary: int) -> None:
    """For every number of drafts, at every place around the boundary, with none, some and nearly all accepted."""
    tokens, logits, arenas = text
    for position in range(max(0, boundary - 2), boundary + 1):
        for num_drafts in range(1, MAX_DRAFTS + 1):
            accepted = (position + num_drafts) % (num_drafts + 1) if num_drafts < MAX_DRAFTS else 0
            check(runner, tokens, logits, arenas, position, num_drafts, accepted)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_rejected_drafts_leave_the_state_right_for_every_number_accepted(
    runner: Runner, text: Any, boundary: int
) -> None:
    tokens, logits, arenas = text
    for position in range(max(0, boundary - 5), boundary + 5):
        for num_drafts in range(1, MAX_DRAFTS + 1):
            for accepted in range(num_drafts + 1):
                check(runner, tokens, logits, arenas, position, num_drafts, accepted)


def check(
    runner: Runner, tokens: list[int], logits: torch.Tensor, arenas: Any, position: int, num_drafts: int, accepted: int
) -> None:
    """The last token, at `position`, is run with drafts of which the first `accepted` are right; then what follows."""
    runner.kv.copy_(arenas[position])
    right = tokens[position + 1 : position + 1 + accepted]
    wrong = [(token + 1) % 96 for token in tokens[position + 1 + accepted : position + 1 + num_drafts]]
    found = [runner.run([tokens[position], *right, *wrong], position)[: accepted + 1]]
    at = position + accepted + 1
    while at < position + accepted + 1 + BEHIND:
        count = 1 + at % 2  # one by one and in pairs
        found.append(runner.run(tokens[at : at + count], at))
        at += count
    end = at
    where = f"at {position}, {num_drafts} drafts, {accepted} accepted"
    torch.testing.assert_close(
        torch.cat(found), logits[position:end], rtol=1e-3, atol=1e-3, msg=lambda text: f"{where}: {text}"
    )


def test_rejected_again_and_again_at_one_place(runner: Runner, text: Any) -> None:
    """Every step drafts the most that there may be, all wrong, over several groups."""
    tokens, logits, arenas = text
    start = 118
    runner.kv.copy_(arenas[start])
    found = []
    for position in range(start, start + 24):
        wrong = [(token + 1) % 96 for token in tokens[position + 1 : position + 1 + MAX_DRAFTS]]
        found.append(runner.run([tokens[position], *wrong], position)[:1])
    torch.testing.assert_close(torch.cat(found), logits[start : start + 24], rtol=1e-3, atol=1e-3)
