"""Training text: sampling with a cache is the model's own, repeats are cut, templates are well formed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib.npyio import NpzFile
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from flowinfer.train import facts, generate, prompts, tales
from flowinfer.train.llama import Llama
from flowinfer.train.prepare import Chat, bounds, split, templates, tidy

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "rope_theta": 1e4, "intermediate_size": 24, "vocab_size": 50,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Llama:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(50, 16), "model.norm.weight": torch.ones(16)}
    for i in range(2):
        name = f"model.layers.{i}."
        shapes = {"q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16)}
        tensors |= {f"{name}self_attn.{k}_proj.weight": torch.randn(v) * 0.3 for k, v in shapes.items()}
        shapes = {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}
        tensors |= {f"{name}mlp.{k}_proj.weight": torch.randn(v) * 0.3 for k, v in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return Llama(tmp_path, "cpu", torch.float32)


def test_cold_sampling_is_the_best_token_of_whole_passes(model: Llama, tmp_path: Path) -> None:
    rng = random.Random(1)
    asked = (generate.Chat([rng.randrange(3, 50) for _ in range(rng.randrange(3, 9))], 3, []) for _ in range(1000))
    found = generate.generate(model, asked, batch=3, answer=20, temperature=1e-3, seconds=1e9, tokens=150)
    assert sum(len(chat.answer) for chat in found) >= 150
    for chat in found:
        whole = torch.tensor([chat.prompt + chat.answer])
        hidden, _ = model.forward(whole)
        best = (hidden[0] @ model.lm_head.T).argmax(-1)[len(chat.prompt) - 1 : -1].tolist()
        assert chat.answer == best
        assert len(chat.answer) <= 20 and (len(chat.answer) == 20 or chat.answer[-1] == model.eos)
    generate.save(found, tmp_path / "out", most=100)
    parts = [np.load(path) for path in sorted((tmp_path / "out").glob("generated-*.npz"))]
    assert len(parts) > 1
    assert [s.tolist() for part in parts for s in (part["tokens"][a:b] for a, b in bounds(part))] == [
        chat.prompt for chat in found
    ]


def test_an_answer_ends_before_it_repeats_itself() -> None:
    text = "The owl sat in a tree. It was a warm night and the moon was round. It was a warm night and then"
    kept = tidy(Chat("Tell me.", text, False, 1))
    assert kept == Chat("Tell me.", "The owl sat in a tree. It was a warm night and the moon was round.", True, 1)


def test_a_cut_answer_ends_with_a_sentence_or_is_dropped() -> None:
    assert tidy(Chat("a", "One and two make three. And four is", False, 0)) == Chat(
        "a", "One and two make three.", True, 0
    )
    assert tidy(Chat("a", "This never comes to an", False, 0)) is None
    assert tidy(Chat("a", "```python\nx = 1. Some more code here", False, 4)) is None
    assert tidy(Chat("a", "Yes.", True, 0)) == Chat("a", "Yes.", True, 0)


def test_templates_are_whole_different_and_the_same_for_a_seed() -> None:
    chats = templates(3000, random.Random(1))
    assert chats == templates(3000, random.Random(1))
    assert {chat.kind for chat in chats} == {0, 1, 3, 4}
    for chat in chats:
        assert chat.user and chat.answer and not set("{}") & set(chat.user), chat
        assert "{" not in chat.answer or "json" in chat.answer, chat
    stories = {chat.answer for chat in chats if chat.kind == prompts.STORY}
    assert len(stories) > 1400
    # No story may be cut by the rule for what repeats itself: it would end in the middle.
    whole = [chat for chat in chats if chat.kind == prompts.STORY and tidy(chat) == chat]
    assert len(whole) > 0.9 * len(stories)


def test_stories_are_about_what_was_asked() -> None:
    rng = random.Random(2)
    for _ in range(300):
        asked, told = tales.story(rng)
        for name in (*prompts.NAMES, *prompts.ANIMALS):
            if f" {name} " in f" {asked.rstrip('.?')} ".replace(",", " "):
                assert name in told, (asked, told)


def test_sums_are_right() -> None:
    rng = random.Random(3)
    sums = [answer for _ in range(4000) if " = " in (answer := facts.chat(rng)[1]) and "def" not in answer]
    assert len(sums) > 100
    for text in sums:
        left, right = text.rstrip(".").split(" = ")
        assert eval(left) == int(right)


def test_held_out_chats_are_not_trained_on() -> None:
    chats = [Chat(str(i), "x", True, 0) for i in range(500)]
    held, kept = split(chats, random.Random(0))
    assert len(held) == 10 and not {c.user for c in held} & {c.user for c in kept}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Nine chats of 10 tokens, 4 of them prompt; every third is of kind 2."""
    np.savez_compressed(
        tmp_path / "shard-000.npz",
        tokens=np.arange(90, dtype=np.uint16),
        starts=np.arange(9, dtype=np.uint32) * 10,
        prompt_len=np.full(9, 4, np.uint16),
        kind=np.array([0, 1, 2] * 3, np.uint8),
    )
    return tmp_path / "shard-000.npz"


def test_prompts_of_chats_are_read_with_one_look_an_array(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    read = NpzFile.__getitem__
    monkeypatch.setattr(NpzFile, "__getitem__", lambda self, key: looks.append(key) or read(self, key))
    found = generate.asked_before([shard])
    assert [chat.prompt[0] for chat in found] == [0, 10, 30, 40, 60, 70]
    assert sorted(looks) == ["kind", "prompt_len", "starts", "tokens"]


def test_time_counts_while_prompts_are_prepared(model: Llama) -> None:
    """A slow source of prompts: what was begun is filled, then nothing more is asked."""
    clock = iter([0.0, 0.0, *[9.0] * 99])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate.time, "perf_counter", lambda: next(clock))
        asked = iter([generate.Chat([3, 4], 3, []) for _ in range(3)])
        assert generate.generate(model, asked, batch=3, answer=40, temperature=1.0, seconds=5, tokens=10**6) == []


def test_what_is_there_is_written_at_sigterm(model: Llama, tmp_path: Path) -> None:
    Tokenizer(WordLevel({"[UNK]": 7}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    options = ["--model", tmp_path, "--out", tmp_path / "out", "--batch", 4, "--answer", 8, "--seconds", 500]
    command = [sys.executable, "-m", "flowinfer.train.generate", *options, "--tell", 0]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["prompts_of_chats"] == 0
        while not (told := json.loads(process.stdout.readline()))["tokens"]:
            pass
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0 and "stopped by a signal" in rest
    written = np.load(tmp_path / "out" / "generated-000.npz")
    assert len(written["starts"]) >= told["chats"] > 0
