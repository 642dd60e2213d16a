"""The draft head: rings equal whole contexts, slots are apart, a file holds all of it, a choice shapes the next."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flowinfer.engine.draft import DraftHead, HeadConfig
from flowinfer.errors import ModelError

CONFIG = HeadConfig(
    target="tiny", hidden_size=16, vocab_size=40, feature_layers=(0, 2), num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, ffn_size=24, rank=4, mixer_size=12, window=8,
)  # fmt: skip
EMBED = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def head() -> DraftHead:
    made = DraftHead.random(CONFIG, EMBED, EMBED, "cpu", torch.float32, seed=2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    return made


def features(count: int, seed: int = 3) -> Tensor:
    return torch.randn(count, CONFIG.feature_size, generator=torch.Generator().manual_seed(seed))


def greedy(_: int, logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def drafted(head: DraftHead, state: object, slot: int, anchor: int, position: int) -> tuple[Tensor, Tensor]:
    return head.draft(state, ids(slot), ids(anchor), ids(position), greedy)


def test_a_ring_drafts_what_the_last_window_alone_does(head: DraftHead) -> None:
    rows = features(21)
    long, short = head.new_state(3), head.new_state(3)
    for start, end in ((0, 5), (5, 6), (6, 13), (13, 21)):
        long.append(ids(*[1] * (end - start)), torch.arange(start, end), rows[start:end])
    short.append(ids(*[1] * 8), torch.arange(13, 21), rows[13:])
    torch.testing.assert_close(drafted(head, long, 1, 7, 21), drafted(head, short, 1, 7, 21))


def test_rows_drafted_together_equal_rows_drafted_alone(head: DraftHead) -> None:
    state = head.new_state(4)
    state.append(ids(0, 0, 0, 2, -1, 2), ids(3, 4, 5, 9, 0, 10), features(6))
    tokens, confidences = head.draft(state, ids(0, 3, 2), ids(5, 6, 7), ids(6, 1, 11), greedy)
    assert tokens.shape == confidences.shape == (3, CONFIG.block)
    for row, (slot, anchor, position) in enumerate(((0, 5, 6), (3, 6, 1), (2, 7, 11))):
        alone = drafted(head, state, slot, anchor, position)
        torch.testing.assert_close((tokens[row : row + 1], confidences[row : row + 1]), alone)


def test_a_joined_slot_has_forgotten_the_sequence_before(head: DraftHead) -> None:
    state = head.new_state(2)
    empty = drafted(head, state, 0, 5, 4)
    state.append(ids(0, 0), ids(2, 3), features(2))
    assert not torch.allclose(drafted(head, state, 0, 5, 4)[1], empty[1])
    state.join(0)
    torch.testing.assert_close(drafted(head, state, 0, 5, 4), empty)


def test_only_the_window_before_the_anchor_is_seen(head: DraftHead) -> None:
    state = head.new_state(1)
    state.append(ids(*[0] * 5), torch.arange(2, 7), features(5))
    for position, wanted in ((4, 2), (7, 5), (14, 1), (15, 0)):
        _, seen, newest = state.read(ids(0), ids(position))
        assert seen.sum() == wanted
        assert bool(newest.any()) == (position == 7)


def test_a_choice_moves_the_next_logits_and_confidence_but_not_its_own(head: DraftHead) -> None:
    state = head.new_state(1)
    state.append(ids(0), ids(0), features(1))
    seen: list[list[Tensor]] = []

    def run(first: int) -> Tensor:
        seen.append([])

        def choose(k: int, logits: Tensor) -> Tensor:
            assert k == len(seen[-1])
            seen[-1].append(logits)
            return ids(first if k == 0 else 11)

        return head.draft(state, ids(0), ids(3), ids(1), choose)[1]

    one, other = run(4), run(9)
    torch.testing.assert_close(seen[0][0], seen[1][0])
    assert not torch.allclose(seen[0][1], seen[1][1])
    assert one[0, 0] == other[0, 0] and one[0, 1] != other[0, 1]


def test_a_file_holds_weights_sizes_and_temperatures(head: DraftHead, tmp_path: Path) -> None:
    head.config = msgspec.structs.replace(CONFIG, temperatures=(0.5, 1.0, 2.0, 1.5, 1.0))
    head.save(tmp_path / "draft.safetensors", dtype=torch.float32)
    again = DraftHead.load(tmp_path / "draft.safetensors", EMBED, EMBED, "cpu", torch.float32)
    assert again.config == head.config and again.feature_layers == (0, 2)
    plain, hotter = (drafted(each, each.new_state(1), 0, 5, 4) for each in (head, again))
    assert torch.equal(plain[0], hotter[0])
    torch.testing.assert_close(hotter[1].logit() * torch.tensor(head.config.temperatures), plain[1].logit())


def test_the_targets_matrices_stay_the_targets(head: DraftHead) -> None:
    names = set(head.state_dict())
    head.attach(torch.nn.Parameter(EMBED), torch.nn.Parameter(EMBED))
    assert set(head.state_dict()) == names


def test_a_head_for_another_model_is_refused(head: DraftHead, tmp_path: Path) -> None:
    head.save(tmp_path / "draft.safetensors")
    with pytest.raises(ModelError, match=r"for tiny.*model's is"):
        DraftHead.load(tmp_path / "draft.safetensors", EMBED[:30], EMBED[:30], "cpu", torch.float32)
    save_file({"a": EMBED}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="no draft head"):
        DraftHead.load(tmp_path / "other.safetensors", EMBED, EMBED, "cpu", torch.float32)


def test_an_untrained_bias_is_the_papers() -> None:
    """The correction starts at zero, so row k is W1 of the token before and nothing else."""
    head = DraftHead.random(CONFIG, EMBED, EMBED, "cpu", torch.float32)
    row, _ = head.markov(torch.randn(2, 16), ids(3, 4), torch.randn(2, 4))
    torch.testing.assert_close(row, head.markov.w1.weight[[3, 4]])
