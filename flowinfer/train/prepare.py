"""Chats to training data: a byte-level BPE with DeepSeek's control tokens, and chats as one array of its token ids.

Reads shards of sampled chats (npz: tokens uint16, starts uint32, prompt_len uint16, kind uint8) and the tokenizer that
their ids belong to. Kind 2, questions of public lists, is left out: some of those lists forbid commercial use.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 8192
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, UNTHINK = "<think>", "</think>"
# The order is the ids': 0 and 1 as in the large models; what isn't trained on is there so that prompts look alike.
SPECIAL = [BOS, EOS, "<｜▁pad▁｜>", USER, ASSISTANT, "<｜System｜>", THINK, UNTHINK]
SPECIAL += ["｜DSML｜", "<｜latest_reminder｜>", "<｜noise｜>"]
SPLIT = r"\p{N}{1,3}|[^\s\p{L}\p{N}]+[\r\n]*| ?\p{L}+|\s+(?!\S)|\s+"
LEFT_OUT = 2
HELD_OUT = 50  # one chat of so many is never trained on


def read_chats(shards: list[Path], tokenizer: Tokenizer) -> Iterator[tuple[str, str, bool]]:
    """User text, answer, and whether the answer came to its end, of every chat that may be used."""
    end = tokenizer.token_to_id("<|im_end|>")
    for shard in shards:
        data = np.load(shard)
        tokens, starts = data["tokens"], data["starts"].tolist()
        for start, stop, size, kind in zip(
            starts, [*starts[1:], len(tokens)], data["prompt_len"].tolist(), data["kind"].tolist(), strict=True
        ):
            if kind == LEFT_OUT:
                continue
            prompt = tokenizer.decode(tokens[start : start + size].tolist(), skip_special_tokens=False)
            user = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0]
            answer = tokens[start + size : stop]
            yield user.strip(), tokenizer.decode(answer.tolist()).strip(), bool(len(answer) and answer[-1] == end)


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


def encode(chats: list[tuple[str, str, bool]], tokenizer: Tokenizer) -> np.ndarray:
    """uint16 ids of the chats, one after the other, each from its BOS; an answer that was cut off has no EOS."""
    opening, middle = _ids(tokenizer, BOS, USER), _ids(tokenizer, ASSISTANT, UNTHINK)
    ending = _ids(tokenizer, EOS)
    users = tokenizer.encode_batch_fast([user for user, _, _ in chats], add_special_tokens=False)
    answers = tokenizer.encode_batch_fast([answer for _, answer, _ in chats], add_special_tokens=False)
    found: list[int] = []
    for user, answer, (_, _, whole) in zip(users, answers, chats, strict=True):
        found += opening + user.ids + middle + answer.ids + (ending if whole else [])
    return np.array(found, np.uint16)


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids: list[int] = tokenizer.encode("".join(tokens), add_special_tokens=False).ids
    return ids


def main() -> None:
    """Writes tokenizer.json, train.npy and held_out.npy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=Path, required=True, help="folder of shard-*.npz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the shards' ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chats = list(read_chats(sorted(args.chats.glob("shard-*.npz")), Tokenizer.from_file(str(args.tokenizer))))
    random.Random(args.seed).shuffle(chats)
    held, kept = chats[::HELD_OUT], [chat for i, chat in enumerate(chats) if i % HELD_OUT]
    tokenizer = train_tokenizer(part for user, answer, _ in kept for part in (user, answer))
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    for name, part in (("train", kept), ("held_out", held)):
        tokens = encode(part, tokenizer)
        np.save(args.out / f"{name}.npy", tokens)
        print(f"{name}: {len(part)} chats, {len(tokens):,} tokens")


if __name__ == "__main__":
    main()
