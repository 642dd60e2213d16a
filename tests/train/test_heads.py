"""Draft heads: training's pass is serving's, a head learns its target, temperatures make confidences honest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flowinfer.engine import manifest
from flowinfer.engine.draft import DraftHead, HeadConfig
from flowinfer.engine.draft.head import read
from flowinfer.train import cards, export, heads, speculate
from flowinfer.train.anchors import anchors_of, block_hidden
from flowinfer.train.targets import Chats, load_chats

CONFIG = HeadConfig(
    target="tiny", hidden_size=16, vocab_size=40, feature_layers=(0, 1), num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, ffn_size=24, rank=4, mixer_size=8, window=16,
)  # fmt: skip


class Copycat:
    """A target whose next token is always the same function of this one, with some doubt."""

    config = CONFIG
    eos = 1

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(5)
        self.embed = torch.randn(40, 16, generator=seeded)
        self.lm_head = torch.randn(40, 16, generator=seeded)

    def hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = F.embedding(tokens, self.embed)
        return 0.7 * states, torch.cat((states, states.roll(1, -1)), -1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def chats(tmp_path: Path) -> Chats:
    """Each of 4 tokens of prompt and 30 of an answer that the target would write."""
    target, rng = Copycat(), np.random.default_rng(1)
    best = (0.7 * target.embed @ target.lm_head.T).argmax(-1).numpy()
    texts = []
    for _ in range(32):
        text = rng.integers(2, 40, 4).tolist()
        while len(text) < 34:
            text.append(int(best[text[-1]]) if rng.random() < 0.9 else int(rng.integers(2, 40)))
        texts.append(text)
    np.savez(
        tmp_path / "a.npz",
        tokens=np.array(texts, np.uint16).ravel(),
        starts=np.arange(32, dtype=np.uint32) * 34,
        prompt_len=np.full(32, 4, np.uint16),
        kind=np.array([0, 1, 2, 3] * 8, np.uint8),
    )
    return load_chats([tmp_path / "a.npz"], size=30, least=8)


def made(target: Copycat) -> DraftHead:
    head = DraftHead(CONFIG)
    head.attach(target.embed, target.lm_head)
    return head


def test_rows_leave_out_what_may_not_be_used_and_are_cut(chats: Chats) -> None:
    assert len(chats) == 24 and set(chats.kinds) == {0, 1, 3}
    tokens, lengths, _ = chats.rows("cpu")
    assert tokens.shape == (24, 128) and lengths.unique().tolist() == [30]


def test_trainings_pass_is_the_one_that_serves(chats: Chats) -> None:
    target = Copycat()
    head = made(target)
    tokens, lengths, prompts = chats.rows("cpu")
    _, features = target.hidden(tokens)
    rows, at, start = anchors_of(lengths, prompts, 2, head.window)
    mine = block_hidden(head, tokens, features, rows, at, start)
    for i in range(12):
        row, position, first = int(rows[i]), int(at[i]), int(start[i])
        state = head.new_state(1)
        seen = torch.arange(first, position)[-head.window :]
        state.append(torch.zeros_like(seen), seen, features[row, seen])
        served = []

        def choose(k: int, logits: torch.Tensor, served: list[torch.Tensor] = served) -> torch.Tensor:
            served.append(logits)
            return logits.argmax(-1)

        head.draft(state, torch.tensor([0]), tokens[row, position, None], torch.tensor([position]), choose)
        torch.testing.assert_close(served[0], head.logits(mine[i : i + 1])[:, 0] + _first_bias(head, mine[i : i + 1],
                                   tokens[row, position, None]), rtol=1e-4, atol=1e-5)  # fmt: skip


def _first_bias(head: DraftHead, h: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    row, _ = head.markov(h[:, 0], anchor, h.new_zeros(1, CONFIG.rank))
    return head.markov.bias(row)


def test_anchors_lie_in_answers_and_context_before_them(chats: Chats) -> None:
    _, lengths, prompts = chats.rows("cpu")
    rows, at, start = anchors_of(lengths, prompts, 200, CONFIG.window)
    assert (at >= prompts[rows] - 1).all() and (at <= lengths[rows] - 2).all()
    assert 0 < (at == prompts[rows] - 1).float().mean() < 0.05
    assert (start >= 0).all() and (start <= at).all()
    from_answer = (start == prompts[rows] - 1).float().mean()
    assert 0.55 < from_answer < 0.75


def test_a_head_learns_what_its_target_does(chats: Chats) -> None:
    target = Copycat()
    head = made(target)
    before = speculate.report(head, target, chats, anchors=96, device="cpu", seed=0)
    args = argparse.Namespace(seed=0, lr=1e-2, seconds=1e9, steps=60, batch=8, each=8, every=30, init=None)
    heads.train(head, target, chats, args, "cpu")
    after = speculate.report(head.eval(), target, chats, anchors=96, device="cpu", seed=0)
    greedy = [each["acceptance"]["greedy"]["all"]["accepted"] for each in (before, after)]
    assert greedy[1] > greedy[0] + 1.5
    assert set(after["acceptance"]["greedy"]) == {"all", "chat", "story", "explain"}
    assert json.loads(json.dumps(after)) == after


def test_acceptance_of_the_targets_own_distribution_is_one() -> None:
    logits = torch.randn(6, 5, 40)
    drafts = torch.randint(0, 40, (6, 5))
    accepted, overlap = speculate._judge(logits, logits, drafts, 0.7)
    torch.testing.assert_close(accepted, torch.ones(6, 5))
    torch.testing.assert_close(overlap, torch.ones(6, 5))
    accepted, overlap = speculate._judge(logits, torch.randn(6, 5, 40), drafts, 1.0)
    assert accepted.min() < 0.5 and (overlap < 0.9).all()


def test_what_follows_an_end_counts_for_nothing() -> None:
    found = {
        "accepted": np.array([[1.0, 1, 1, 1, 1], [1, 0.5, 1, 1, 1]]),
        "overlap": np.ones((2, 5)),
        "counts": np.array([[True, True, False, False, False], [True] * 5]),
    }
    assert speculate.summary(found)["accepted"] == pytest.approx((2 + 1 + 4 * 0.5) / 2)


def test_calibration_finds_the_heat_that_was_put_in() -> None:
    rng = np.random.default_rng(0)
    honest = rng.normal(1.0, 1.0, (20_000, 3))
    wanted = np.array([2.0, 0.5, 1.0])
    accepted = (rng.random((20_000, 3)) < 1 / (1 + np.exp(-honest))).astype(float)
    heats = speculate.calibrate(honest * wanted, accepted)
    np.testing.assert_allclose(heats, wanted, rtol=0.3)
    after = speculate.cumulative_errors(honest * wanted, accepted, heats)
    assert max(after) < 0.02 < speculate.cumulative_errors(honest * wanted, accepted, [1.0] * 3)[0]


def test_a_card_shows_what_was_measured(chats: Chats, tmp_path: Path) -> None:
    target = Copycat()
    head = made(target)
    report = speculate.report(head, target, chats, anchors=32, device="cpu", seed=0)
    head.save(tmp_path / "draft.safetensors")
    whole = {"run": {"seed": 3, "seconds": 9.0, "device": "cpu"}, "torch": "2", "chats": 24, "held": 24, "log": []}
    (tmp_path / "report.json").write_text(json.dumps(whole | report))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    manifest.write(tmp_path / "model", source="test")
    export.export_head(tmp_path, tmp_path / "model", tmp_path / "out", source="test")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| greedy | all |" in card and "\n---\n" in card
    assert manifest.is_intact(tmp_path / "out", full=True)
    config, tensors = read(tmp_path / "out" / "draft.safetensors")
    assert config.digest == manifest.digest(tmp_path / "model")
    assert set(tensors) == set(head.state_dict())


def test_a_card_tells_of_the_models_own_text() -> None:
    row = {"drafter": "head", "kind": "own mix", "temperature": 0.7, "held": [0.8, 0.4, 0, 0, 0], "accepted": 1.2,
           "error": [0.04, 0.08, 0, 0], "num_tokens": 1234}  # fmt: skip
    bench = {"model": "tiny", "dtype": "float32", "machine": "Chip, 2 cores", "settings": {"answer": "64"}}
    card = cards.own_text([bench | {"acceptance": [row, row | {"drafter": "ngram"}]}])
    assert "| own mix | 0.7 | 1.20 | 0.80, 0.50, 0.00, none | 0.04, 0.08, 0.00, 0.00 | 1,234 |" in card
    assert card.count("own mix") == 1 and cards.own_text([]) == ""
