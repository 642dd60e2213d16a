"""Chats to training data: a byte-level BPE with DeepSeek's control tokens, and chats as one array of its token ids.

Reads shards of sampled chats (npz: tokens uint16, starts uint32, prompt_len uint16, kind uint8) and the tokenizer that
their ids belong to. Kind 2, questions of public lists, is left out: some of those lists forbid commercial use. Sampled
answers that begin to repeat themselves end at the sentence before; templates of our own add answers that hold together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from flowinfer.train import facts, tales
from flowinfer.train.prompts import STORY

VOCAB = 8192
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, UNTHINK = "<think>", "</think>"
# The order is the ids': 0 and 1 as in the large models; what isn't trained on is there so that prompts look alike.
SPECIAL = [BOS, EOS, "<｜▁pad▁｜>", USER, ASSISTANT, "<｜System｜>", THINK, UNTHINK]
SPECIAL += ["｜DSML｜", "<｜latest_reminder｜>", "<｜noise｜>"]
SPLIT = r"\p{N}{1,3}|[^\s\p{L}\p{N}]+[\r\n]*| ?\p{L}+|\s+(?!\S)|\s+"
LEFT_OUT = 2
HELD_OUT = 50  # one chat of so many is never trained on
REPEATED = 6  # words: an answer that says so many again in the same order is repeating itself
LEAST_WORDS = 4
_SENTENCE_END = re.compile(r"[.!?][\"')*]*(?=\s|$)|```(?=\s*\n|\s*$)")


class Chat(NamedTuple):
    """User text, answer, whether the answer came to its end, and the shards' kind."""

    user: str
    answer: str
    whole: bool
    kind: int


def bounds(data: Any) -> list[tuple[int, int]]:
    """Where each chat's prompt begins and ends in the tokens of a shard."""
    starts, sizes = data["starts"].tolist(), data["prompt_len"].tolist()
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def read_chats(shards: list[Path], tokenizer: Tokenizer) -> Iterator[Chat]:
    """Every chat that may be used, as it was sampled."""
    end = tokenizer.token_to_id("<|im_end|>")
    for shard in shards:
        data = np.load(shard)
        tokens, spans, kinds = data["tokens"], bounds(data), data["kind"].tolist()
        prompts, answers, whole, kept = [], [], [], []
        for (start, middle), stop, kind in zip(spans, [*(s for s, _ in spans[1:]), len(tokens)], kinds, strict=True):
            if kind == LEFT_OUT:
                continue
            prompts.append(tokens[start:middle].tolist())
            answers.append(tokens[middle:stop].tolist())
            whole.append(bool(stop > middle and tokens[stop - 1] == end))
            kept.append(kind)
        users = tokenizer.decode_batch(prompts, skip_special_tokens=False)
        for prompt, answer, ended, kind in zip(users, tokenizer.decode_batch(answers), whole, kept, strict=True):
            user = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0]
            yield Chat(user.strip(), answer.strip(), ended, kind)


def tidy(chat: Chat) -> Chat | None:
    """The chat, its answer ended at a sentence before it repeats itself or was cut off; None where nothing is left.

    What is ended so counts as whole: the model should learn to stop.
    """
    words = list(re.finditer(r"\S+", chat.answer))
    seen: set[tuple[str, ...]] = set()
    limit = len(chat.answer)
    for i in range(len(words) - REPEATED + 1):
        phrase = tuple(word.group() for word in words[i : i + REPEATED])
        if phrase in seen:
            limit = words[i + REPEATED - 1].start()
            break
        seen.add(phrase)
    answer = chat.answer
    if limit < len(answer) or not chat.whole:
        ends = [m.end() for m in _SENTENCE_END.finditer(answer) if m.end() <= limit]
        answer = answer[: ends[-1]] if ends else ""
    answer = re.sub(r"\n+\s*\d+\.\s*\**$", "", answer.rstrip())  # a list's next number is no sentence's end
    if len(answer.split()) < min(LEAST_WORDS, len(words)) or answer.count("```") % 2 or not answer:
        return None
    return Chat(chat.user, answer, True, chat.kind)


def tidied(chats: list[Chat], workers: int) -> list[Chat]:
    """All chats that are left, in their order."""
    if workers <= 1:
        return [kept for chat in chats if (kept := tidy(chat))]
    # Spawned: the tokenizer's threads have run by now, and a forked child may hang on a lock that one of them held.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [kept for kept in pool.map(tidy, chats, chunksize=512) if kept]


def templates(count: int, rng: random.Random) -> list[Chat]:
    """Chats of our own, more than half of them stories."""
    found = []
    for _ in range(count):
        if rng.random() < 0.55:
            user, answer = tales.story(rng)
            found.append(Chat(user, answer, True, STORY))
        else:
            user, answer, kind = facts.chat(rng)
            found.append(Chat(user, answer, True, kind))
    return found


def split(chats: list[Chat], rng: random.Random) -> tuple[list[Chat], list[Chat]]:
    """Held out and kept, shuffled."""
    rng.shuffle(chats)
    return chats[::HELD_OUT], [chat for i, chat in enumerate(chats) if i % HELD_OUT]


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB entries, control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(chats: Sequence[Chat], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The shards' arrays in this tokenizer's ids; an answer that was cut off has no EOS."""
    opening, middle = _ids(tokenizer, BOS, USER), _ids(tokenizer, ASSISTANT, UNTHINK)
    ending = _ids(tokenizer, EOS)
    users = tokenizer.encode_batch_fast([chat.user for chat in chats], add_special_tokens=False)
    answers = tokenizer.encode_batch_fast([chat.answer for chat in chats], add_special_tokens=False)
    found: list[int] = []
    starts, sizes = [], []
    for user, answer, chat in zip(users, answers, chats, strict=True):
        prompt = opening + user.ids + middle
        starts.append(len(found))
        sizes.append(len(prompt))
        found += prompt + answer.ids + (ending if chat.whole else [])
    return {
        "tokens": np.array(found, np.uint16),
        "starts": np.array(starts, np.uint32),
        "prompt_len": np.array(sizes, np.uint16),
        "kind": np.array([chat.kind for chat in chats], np.uint8),
    }


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids: list[int] = tokenizer.encode("".join(tokens), add_special_tokens=False).ids
    return ids


def main() -> None:
    """Writes tokenizer.json, train.npz, held_out.npz, held_generated.npz and held_templates.npz, and facts of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=Path, required=True, help="folder of shard-*.npz")
    parser.add_argument("--generated", type=Path, help="folder of generated-*.npz, which `generate` wrote")
    parser.add_argument("--templates", type=int, default=0, help="chats from templates of our own")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the shards' ids")
    parser.add_argument("--keep-tokenizer", type=Path, help="tokenizer.json to use instead of training one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    for folder, pattern in ((args.chats, "shard-*.npz"), (args.generated, "*.npz")):
        if folder and not any(folder.glob(pattern)):
            parser.error(f"{folder} has no {pattern}")
    theirs = Tokenizer.from_file(str(args.tokenizer))
    held, kept = split(list(read_chats(sorted(args.chats.glob("shard-*.npz")), theirs)), random.Random(args.seed))
    print(f"{len(held) + len(kept):,} chats of shards", flush=True)
    parts = {"shards": tidied(kept, args.workers)}
    held_out = {"held_out": held}
    asked = {chat.user for chat in held}
    if args.generated:
        more = tidied(list(read_chats(sorted(args.generated.glob("*.npz")), theirs)), args.workers)
        print(f"{len(more):,} generated chats", flush=True)
        held_out["held_generated"], parts["generated"] = split(more, random.Random(args.seed))
        parts["generated"] = [chat for chat in parts["generated"] if chat.user not in asked]
    if args.templates:
        own = templates(args.templates, random.Random(args.seed))
        held_out["held_templates"], parts["templates"] = split(own, random.Random(args.seed))
    everything = [chat for part in parts.values() for chat in part]
    random.Random(args.seed).shuffle(everything)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.keep_tokenizer:
        tokenizer = Tokenizer.from_file(str(args.keep_tokenizer))
    else:
        tokenizer = train_tokenizer(part for chat in everything for part in (chat.user, chat.answer))
    tokenizer.save(str(args.out / "tokenizer.json"))
    counts = {name: {"chats": len(part)} for name, part in parts.items()}
    for name, chats in {"train": everything, **held_out}.items():
        print(f"{name}: {len(chats):,} chats", flush=True)
        arrays = encode(chats, tokenizer)
        np.savez(args.out / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        counts[name] = {"chats": len(chats), "tokens": len(arrays["tokens"])}
    (args.out / "data.json").write_text(json.dumps(counts, indent=1))
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
