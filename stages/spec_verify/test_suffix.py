"""Suffix drafts: what followed most often, in the sequence itself or in its tenant's outputs, and in nobody else's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.message import Ids
from flowinfer.stages.spec_verify.drafts import Guesses
from flowinfer.stages.spec_verify.suffix import CHUNK, SuffixDraft


class Texts:
    """Histories that grow by hand; the sequence of slot i is of tenant salts[i]."""

    def __init__(self, *salts: str, block: int = 4, **kwargs: int) -> None:
        self.tokens: Ids = np.zeros((len(salts), 4 * CHUNK), np.int32)
        self.num_tokens: Ids = np.zeros(len(salts), np.int32)
        self.num_prompt: Ids = np.zeros(len(salts), np.int32)
        self.salts = list(salts)
        self.draft = SuffixDraft(
            self.tokens, self.num_prompt, lambda slot: self.salts[slot], max_drafts=block, **kwargs
        )

    def prompt(self, slot: int, *tokens: int) -> None:
        self.num_tokens[slot] = 0
        self.say(slot, *tokens)
        self.num_prompt[slot] = len(tokens)
        self.draft.join(slot)

    def say(self, slot: int, *tokens: int) -> None:
        at = self.num_tokens[slot]
        self.tokens[slot, at : at + len(tokens)] = tokens
        self.num_tokens[slot] += len(tokens)

    def guess(self, *slots: int) -> Guesses:
        chosen = np.array(slots, np.int32)
        return self.draft.guess(chosen, self.num_tokens[chosen])

    def drafted(self, slot: int) -> list[int]:
        """Drafts of one slot that have something behind them."""
        found, tokens, confidences = self.guess(slot)
        assert confidences is not None
        return tokens[0][confidences[0] > 0].tolist() if found[0] else []


def test_what_repeats_is_drafted() -> None:
    texts = Texts("")
    texts.prompt(0, 1, 2, 3, 4, 5, 6, 1, 2)
    assert texts.drafted(0) == [3, 4, 5, 6]


def test_a_loop_is_followed_round_and_round() -> None:
    texts = Texts("", block=8)
    texts.prompt(0, *[1, 2, 3] * 8)
    assert texts.drafted(0) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_what_is_new_gives_no_draft() -> None:
    texts = Texts("")
    texts.prompt(0, *range(50))
    found, tokens, confidences = texts.guess(0)
    assert not found[0] and confidences is not None and not confidences.any() and not tokens.any()


def test_the_usual_follower_beats_the_latest() -> None:
    texts = Texts("")
    texts.prompt(0, 9, 1, 2, 7, 8, 1, 2, 7, 6, 1, 2, 7, 5, 1, 2, 3, 4, 1, 2)
    assert texts.drafted(0)[:1] == [7]


def test_a_follower_that_takes_over_is_learned() -> None:
    texts = Texts("")
    texts.prompt(0, *[1, 2, 7, 5, 6] * 3)
    texts.guess(0)
    for _ in range(12):
        texts.say(0, 1, 2, 3, 5, 6)
        texts.guess(0)
    texts.say(0, 1, 2)
    assert texts.drafted(0)[:2] == [3, 5]


def test_confidence_is_the_share_of_times_that_the_token_followed() -> None:
    texts, generator = Texts(""), np.random.default_rng(0)
    texts.prompt(0, 99)
    usual, told = [], []
    for i in range(250):
        texts.say(0, 1, 2)
        found, tokens, confidences = texts.guess(0)
        assert confidences is not None
        usual.append(found[0] and tokens[0, 0] == 3)
        told.append(float(confidences[0, 0]))
        texts.say(0, 3 if generator.random() < 0.7 else 2000 + i, 1000 + i)
    assert np.mean(usual[50:]) > 0.85
    assert abs(np.mean(told[50:]) - 0.7 * np.mean(usual[50:])) < 0.1


def test_the_longest_match_decides() -> None:
    texts = Texts("")
    texts.prompt(0, 5, 6, 1, 2, 3, 8, 7, 9, 1, 2, 4, 5, 6, 1, 2)
    assert texts.drafted(0)[0] == 3, "behind 5, 6, 1, 2 came 3; behind 1, 2 alone, 4 was the latest"


def test_a_short_match_gives_few_drafts() -> None:
    texts = Texts("", block=8)
    texts.prompt(0, 1, 2, *range(10, 30), 1, 2)
    assert texts.drafted(0) == [10, 11, 12, 13]


def test_outputs_are_drafted_for_the_same_tenant_only() -> None:
    texts = Texts("a", "a", "b")
    texts.prompt(0, 1, 2)
    texts.say(0, 3, 4, 5, 6)
    texts.guess(0)
    texts.prompt(1, 1, 2)
    texts.prompt(2, 1, 2)
    assert texts.drafted(1) == [3, 4, 5, 6][: len(texts.drafted(1))] != []
    assert texts.drafted(2) == []


def test_prompts_are_no_outputs() -> None:
    texts = Texts("a", "a")
    texts.prompt(0, 1, 2, 3, 4, 5)
    texts.guess(0)
    texts.prompt(1, 1, 2)
    assert texts.drafted(1) == []


def test_a_new_sequence_knows_nothing_of_the_one_before_in_its_slot() -> None:
    texts = Texts("a")
    texts.prompt(0, 1, 2, 3, 4, 5)
    texts.guess(0)
    texts.salts[0] = "b"
    texts.prompt(0, 1, 2)
    assert texts.drafted(0) == []


def test_a_long_prompt_is_entered_whole() -> None:
    texts, generator = Texts(""), np.random.default_rng(0)
    text = generator.permutation(3 * CHUNK).tolist()
    texts.prompt(0, *text, *text[3:7])
    assert texts.drafted(0) == text[7:11]
    for start in (CHUNK - 3, CHUNK - 2, CHUNK - 1, CHUNK, 2 * CHUNK + 7, 3 * CHUNK - 5):
        texts.say(0, *text[start : start + 4])
        assert texts.drafted(0)[:1] == [text[start + 4]], "a context over the edge of a chunk is missing"


def test_a_batch_gets_what_each_would_alone() -> None:
    def text(i: int) -> list[int]:
        return np.random.default_rng(i).integers(0, 5, 60 + i).tolist()

    together = Texts(*"abcdef")
    for i in range(6):
        together.prompt(i, *text(i))
    both = together.guess(*range(6))
    for i in range(6):
        alone = Texts("x")
        alone.prompt(0, *text(i))
        one = alone.guess(0)
        assert both.found[i] == one.found[0] and both.tokens[i].tolist() == one.tokens[0].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_table_that_is_far_too_small_mixes_up_nobody(seed: int) -> None:
    """Tenant i speaks in tokens 100 i .. 100 i + 3, so that a token from elsewhere shows."""
    generator = np.random.default_rng(seed)
    texts = Texts(*"abcd", cells_log2=5)
    for slot in range(4):
        texts.prompt(slot, *(100 * slot + generator.integers(0, 4, 20)))
    for _ in range(20):
        found, tokens, confidences = texts.guess(0, 1, 2, 3)
        assert confidences is not None
        foreign = (tokens // 100 != np.arange(4)[:, None]) & (confidences > 0)
        assert not foreign.any()
        assert (confidences[:, 1:] > 0)[confidences[:, :-1] == 0].sum() == 0, "a gap in a draft"
        assert (found == (confidences[:, 0] > 0)).all()
        for slot in range(4):
            texts.say(slot, *(100 * slot + generator.integers(0, 4, int(generator.integers(1, 6)))))


@pytest.mark.parametrize("block", [1, 8])
def test_a_block_has_its_size(block: int) -> None:
    texts = Texts("", block=block)
    texts.prompt(0, *[1, 2, 3] * 20)
    assert texts.guess(0).tokens.shape == (1, block) and len(texts.drafted(0)) == block
