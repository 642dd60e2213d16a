"""A second model drafts: as the target would where it is the target, over KV that ends with each sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.step import StepInput
from flowinfer.message import Ids
from flowinfer.stages.spec_verify.drafts import Guesses
from flowinfer.stages.spec_verify.model_draft import CATCH_UP, ModelDraft

torch.set_num_threads(1)
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=1024, initializer_range=0.3, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class Greedy:
    """A batch whose target is the draft model itself, at temperature 0."""

    def __init__(self, folder: Path, num_slots: int = 3, num_blocks: int = 64) -> None:
        self.model = load_model(folder, dtype="float32", device="cpu")
        self.layout = hub.describe(folder).layout("float32")
        self.tokens: Ids = np.zeros((num_slots, 1100), np.int32)
        self.num_tokens: Ids = np.zeros(num_slots, np.int32)
        self.draft = ModelDraft(self.model, self.layout, self.tokens, block=BLOCK, num_blocks=num_blocks)
        self.num_chosen = 0

    def add(self, slot: int, length: int, seed: int = 0) -> None:
        self.tokens[slot, :length] = np.random.default_rng(seed).integers(3, 64, length)
        self.num_tokens[slot] = length
        self.draft.join(slot)

    def guess(self, *slots: int) -> Guesses:
        chosen = np.array(slots, np.int32)
        return self.draft.guess(chosen, self.num_tokens[chosen], lambda place, logits: logits.argmax(1))

    def say(self, slot: int, *tokens: int) -> None:
        at = int(self.num_tokens[slot])
        self.tokens[slot, at : at + len(tokens)] = tokens
        self.num_tokens[slot] += len(tokens)

    def next(self, slot: int, count: int) -> list[int]:
        """What the target says next, computed from scratch."""
        text = self.tokens[slot, : self.num_tokens[slot]].tolist()
        blocks = self.layout.blocks_for(len(text) + count)
        kv = torch.zeros((blocks, *self.layout.block_shape))
        for _ in range(count):
            step = StepInput(
                tokens=torch.tensor(text),
                positions=torch.arange(len(text)),
                query_starts=np.array([0, len(text)], np.int32),
                kv_lens=np.array([len(text)], np.int32),
                block_tables=np.arange(blocks, dtype=np.int32)[None],
                logit_rows=torch.tensor([len(text) - 1]),
            )
            with torch.inference_mode():
                logits = self.model.forward(step, kv)
            assert logits is not None
            text.append(int(logits[0].argmax()))
        return text[-count:]


def test_drafts_are_what_the_model_says_next(folder: Path) -> None:
    batch = Greedy(folder)
    for slot, length in enumerate((1, 20, 65)):
        batch.add(slot, length, seed=slot)
    found, tokens, confidences = batch.guess(0, 1, 2)
    assert found.all() and confidences is not None and (confidences > 0).all()
    assert [tokens[slot].tolist() for slot in range(3)] == [batch.next(slot, BLOCK) for slot in range(3)]


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_it_catches_up_with_whatever_became_of_its_drafts(folder: Path, accepted: int) -> None:
    batch = Greedy(folder)
    batch.add(0, 30)
    batch.add(1, 7, seed=1)
    for _ in range(3):
        drafts = batch.guess(0, 1).tokens
        other = 3 + (int(drafts[0, min(accepted, BLOCK - 1)]) + 1) % 60
        batch.say(0, *drafts[0, :accepted], other)
        batch.say(1, int(drafts[1, 0]))
        tokens = batch.guess(0, 1).tokens
        assert tokens[0].tolist() == batch.next(0, BLOCK) and tokens[1].tolist() == batch.next(1, BLOCK)


def test_steps_without_drafts_are_caught_up_with(folder: Path) -> None:
    batch = Greedy(folder)
    batch.add(0, 10)
    drafts = batch.guess(0).tokens[0]
    batch.say(0, int(drafts[0]), *range(5, 40))
    assert batch.guess(0).tokens[0].tolist() == batch.next(0, BLOCK)


def test_a_long_prompt_is_run_in_parts_and_holds_up_nobody(folder: Path) -> None:
    batch = Greedy(folder)
    batch.add(0, CATCH_UP + 100)
    batch.add(1, 9, seed=1)
    found, tokens, _ = batch.guess(0, 1)
    assert found.tolist() == [False, True] and tokens[1].tolist() == batch.next(1, BLOCK)
    found, tokens, _ = batch.guess(0, 1)
    assert found.all() and tokens[0].tolist() == batch.next(0, BLOCK)


def test_blocks_come_back_when_sequences_leave(folder: Path) -> None:
    batch = Greedy(folder, num_blocks=16)
    for slot in range(3):
        batch.add(slot, 100, seed=slot)
    batch.guess(0, 1, 2)
    assert batch.draft.num_free == 16 - 3 * 2
    batch.draft.leave(1)
    batch.draft.leave(1)
    batch.add(0, 10)
    assert batch.draft.num_free == 16 - 2
    batch.draft.leave(0)
    batch.draft.leave(2)
    assert batch.draft.num_free == 16


def test_who_finds_no_block_goes_undrafted_until_there_is_one(folder: Path) -> None:
    batch = Greedy(folder, num_blocks=3)
    batch.add(0, 100)
    batch.add(1, 100, seed=1)
    assert batch.guess(0, 1).found.tolist() == [True, False]
    batch.draft.leave(0)
    found, tokens, _ = batch.guess(1)
    assert found.tolist() == [True] and tokens[0].tolist() == batch.next(1, BLOCK)


def test_nothing_is_drafted_past_the_positions_of_the_model(folder: Path) -> None:
    batch = Greedy(folder)
    batch.add(0, 1024 - BLOCK)
    batch.add(1, 1024 - BLOCK + 1, seed=1)
    for _ in range(6):
        found = batch.guess(0, 1).found
    assert found.tolist() == [True, False]


def test_confidence_is_the_models_own_probability_of_the_token(folder: Path) -> None:
    batch = Greedy(folder)
    batch.add(0, 10)
    seen: list[torch.Tensor] = []

    def choose(place: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return logits.argmax(1)

    _, tokens, confidences = batch.draft.guess(np.array([0], np.int32), batch.num_tokens[:1], choose)
    assert confidences is not None
    expected = [float(logits.softmax(1)[0, token]) for logits, token in zip(seen, tokens[0].tolist(), strict=True)]
    assert confidences[0].tolist() == pytest.approx(expected)
