"""Writes training text with a Llama on one GPU: answers to template prompts and again to the prompts of given shards.

Rows of one fixed cache sample side by side, a CUDA graph a step; every few steps the host takes finished answers out
and puts new prompts in. Output has the arrays of the shards that `prepare` reads (kind 4: code or fixed form). What is
answered is written when time is over, and at SIGTERM or Ctrl-C too.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from flowinfer.train import prompts
from flowinfer.train.llama import Cache, Llama
from flowinfer.train.prepare import LEFT_OUT, bounds

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TURNS = 16  # steps between looks at what has finished
LONGEST_PROMPT = 128


@dataclass
class Chat:
    """A prompt's ids, its kind, and the answer once it's there."""

    prompt: list[int]
    kind: int
    answer: list[int]


def asked_before(shards: list[Path]) -> list[Chat]:
    """The prompts of shards that may be used and aren't too long, their answers left out."""
    found = []
    for shard in shards:
        data = np.load(shard)
        tokens = data["tokens"]  # read once: every look into the file unpacks the whole array
        for (start, stop), kind in zip(bounds(data), data["kind"].tolist(), strict=True):
            if kind != LEFT_OUT and stop - start <= LONGEST_PROMPT:
                found.append(Chat(tokens[start:stop].tolist(), kind, []))
    return found


def wanted(tokenizer: Tokenizer, again: list[Chat], share: float, rng: random.Random) -> Iterator[Chat]:
    """Prompts without end: `share` of them from `again` while there are any, else from templates."""
    again = list(again)
    rng.shuffle(again)
    while True:
        if again and rng.random() < share:
            yield again.pop()
            continue
        user, kind = prompts.write(rng)
        text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        yield Chat(tokenizer.encode(text, add_special_tokens=False).ids, kind, [])


class Sampler:
    """`batch` rows that each hold one chat; `turn` runs TURNS steps over all of them."""

    def __init__(self, model: Llama, batch: int, answer: int, temperature: float) -> None:
        self.model, self.answer = model, answer
        size = -(-(LONGEST_PROMPT + answer) // 8) * 8
        self.cache = Cache(model, batch, size)
        device = model.embed.device
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ring = torch.zeros(TURNS, batch, dtype=torch.int64, device=device)
        self.temperature = temperature
        self.rows: list[Chat | None] = [None] * batch
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def fill(self, row_ids: list[int], chats: list[Chat]) -> None:
        """New chats into rows: one pass over all their prompts but the last tokens."""
        longest = max(len(chat.prompt) for chat in chats)
        packed = np.zeros((len(chats), longest), np.int64)
        for i, chat in enumerate(chats):
            packed[i, : len(chat.prompt)] = chat.prompt
            self.rows[row_ids[i]] = chat
        device = self.tokens.device
        rows, padded = torch.tensor(row_ids, device=device), torch.from_numpy(packed).to(device)
        last = torch.tensor([len(chat.prompt) - 1 for chat in chats], device=device)
        self.cache.rows = rows
        self.model.forward(padded, (), self.cache)
        self.tokens[rows] = padded.gather(1, last.unsqueeze(1)).squeeze(1)
        self.positions[rows] = last

    @torch.inference_mode()
    def turn(self) -> np.ndarray:
        """int64 [TURNS, batch] sampled tokens."""
        if self.tokens.is_cuda and self._graph is None:
            self._graph = self._capture()
        for i in range(TURNS):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
            self.ring[i] = self.tokens
        sampled: np.ndarray = self.ring.cpu().numpy()
        return sampled

    def _step(self) -> None:
        logits = self.model.step(self.tokens, self.positions, self.cache).float() / self.temperature
        noise = torch.empty_like(logits).exponential_()
        self.tokens.copy_((logits.softmax(-1) / noise).argmax(-1))
        self.positions.copy_((self.positions + 1).clamp(max=self.cache.size - 1))

    def _capture(self) -> torch.cuda.CUDAGraph:
        kept = self.tokens.clone(), self.positions.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.tokens.copy_(kept[0])
        self.positions.copy_(kept[1])
        return graph


def generate(
    model: Llama,
    chats: Iterator[Chat],
    *,
    batch: int,
    answer: int,
    temperature: float,
    seconds: float,
    tokens: int,
    tell: float = 10.0,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Chat]:
    """Answered chats, until time is over, so many tokens are there or `stopped` says so. Unfinished ones are dropped.

    tell: seconds between lines of progress.
    """
    began, done, count, steps, told = time.perf_counter(), list[Chat](), 0, 0, 0.0
    sampler = Sampler(model, batch, answer, temperature)
    free = list(range(batch))
    while (took := time.perf_counter() - began) < seconds and count < tokens and not stopped():
        if took >= told:
            print(json.dumps({"chats": len(done), "tokens": count, "seconds": round(took, 1)}), flush=True)
            told = took + tell
        for at in range(0, len(free), 512):
            part = free[at : at + 512]
            sampler.fill(part, [next(chats) for _ in part])
        free = []
        sampled = sampler.turn().T.tolist()
        steps += TURNS
        for row, new in enumerate(sampled):
            chat = sampler.rows[row]
            assert chat is not None, "all rows were filled"
            end = new.index(model.eos) + 1 if model.eos in new else TURNS
            chat.answer += new[: min(end, answer - len(chat.answer))]
            if chat.answer[-1] == model.eos or len(chat.answer) >= answer:
                done.append(chat)
                count += len(chat.answer)
                free.append(row)
    took = time.perf_counter() - began
    print(
        f"{len(done):,} chats, {count:,} tokens, {took:.0f} s, {count / took:,.0f} tokens/s, {steps} steps", flush=True
    )
    return done


def save(chats: list[Chat], folder: Path, most: int = 6_000_000) -> None:
    """generated-*.npz of about `most` tokens each, under 15 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    part: list[Chat] = []
    size = number = 0
    for chat in [*chats, None]:
        if part and (chat is None or size > most):
            lengths = [len(each.prompt) + len(each.answer) for each in part]
            np.savez_compressed(
                folder / f"generated-{number:03d}.npz",
                tokens=np.array([t for each in part for t in each.prompt + each.answer], np.uint16),
                starts=np.cumsum([0, *lengths[:-1]]).astype(np.uint32),
                prompt_len=np.array([len(each.prompt) for each in part], np.uint16),
                kind=np.array([each.kind for each in part], np.uint8),
            )
            part, size, number = [], 0, number + 1
        if chat is not None:
            part.append(chat)
            size += len(chat.prompt) + len(chat.answer)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct or its like")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chats", type=Path, help="folder of shard-*.npz whose prompts are answered again")
    parser.add_argument("--share", type=float, default=0.35, help="of the prompts that come from the shards")
    parser.add_argument("--seconds", type=float, default=200.0, help="all but starting Python and writing")
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--batch", type=int, default=1536)
    parser.add_argument("--answer", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--tell", type=float, default=10.0, help="seconds between lines of progress")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.chats and not any(args.chats.glob("shard-*.npz")):
        parser.error(f"--chats {args.chats} has no shard-*.npz")
    began, signals = time.perf_counter(), list[int]()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: signals.append(number))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model = Llama(args.model, device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    again = asked_before(sorted(args.chats.glob("shard-*.npz")) if args.chats else [])
    chats = wanted(tokenizer, again, args.share, random.Random(args.seed))
    took = time.perf_counter() - began
    print(json.dumps({"prompts_of_chats": len(again), "device": device, "seconds": round(took, 1)}), flush=True)
    done = generate(
        model,
        chats,
        batch=args.batch,
        answer=args.answer,
        temperature=args.temperature,
        seconds=args.seconds - took,
        tokens=args.tokens,
        tell=args.tell,
        stopped=lambda: bool(signals),
    )
    save(done, args.out)
    print(f"written to {args.out}" + (", stopped by a signal" if signals else ""), flush=True)


if __name__ == "__main__":
    main()
