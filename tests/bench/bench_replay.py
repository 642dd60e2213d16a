"""Hits without window keys: what each mode of replay saves, how near bounded comes to a cold run, bytes on disk.

Run: python tests/bench/bench_replay.py --json F      (flowinfer-mini in float32 on one core; --small takes a minute)
Prefixes lie in a disk tier without any state, as those do where many prompts branch off. Behind each come 32 tokens of
a prompt, and an answer of 64. Time: from the prompt's arrival to its first logits, by the median. Divergence: KL from
the cold run's distribution to that behind the hit, at each of the 96 positions under the cold run's own tokens, and
the share of its greedy answer that is the same, place by place. The texts are chats in which the model answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from decode_loop import Service, prompt
from harness import machine

from flowinfer.cache.disk.offline import entries
from flowinfer.cache.disk.records import record_size
from flowinfer.engine import hub
from flowinfer.message import Serving
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

SUFFIX, ANSWER, CONTEXT = 32, 64, 4096
LENGTHS = (128, 256, 512, 1024, 2048, 3072, 3968)
MODES = ("cold", "off", "exact", "bounded")
Wanted = dict[tuple[int, int], tuple[list[int], torch.Tensor]]  # by length and text
ASKED = (
    "Write a story about a dog that finds a key.",
    "What is rain?",
    "Tell me how to make soup.",
    "Why do birds sing?",
    "Write a letter to a friend about the sea.",
    "What should I do when I can't sleep?",
    "Tell me about the moon.",
    "Write a story about two children and a boat.",
)


class Bench:
    """One service, with the logits of its steps. folder: of its disk tier."""

    def __init__(self, model: str, folder: Path | None, mode: str) -> None:
        disk = {"disk": {"path": str(folder), "size": "4GiB", "spare": "0"}} if folder else {}
        lookup = {"tiers": {"write": "all", **disk}, "replay": "exact" if mode == "cold" else mode}
        self.service = Service(model, num_blocks=3 * CONTEXT // 128, lookup=lookup, max_batch=8)
        self.service.group.emit(Serving())
        self.engine, prefill = self.service.decode.engine, self.service.group.by_name["prefill"].stage
        prefill.scheduler.token_budget = 512  # type: ignore[attr-defined]
        prefill.scheduler.block_tokens = self.engine.layout.block_tokens  # type: ignore[attr-defined]
        self.rows: list[torch.Tensor] = []
        self.first_at = 0.0
        self.scores_prompt = False
        self._watch()
        self._count = 0

    def _watch(self) -> None:
        forward = self.engine.forward

        def kept(*args: Any, rows: str | None = "all", **how: Any) -> Any:
            logits = forward(*args, rows="all" if self.scores_prompt else rows, **how)
            if rows is not None and not self.first_at:
                self.first_at = time.perf_counter()
            if logits is not None:
                self.rows.append(logits.float())
            return logits

        self.engine.forward = kept

    def ask(self, tokens: list[int], max_tokens: int, **sampling: Any) -> tuple[list[int], float, int]:
        """The answer, seconds to its first logits, and tokens found; nothing is in memory before or after."""
        self.rows, self.first_at, self._count = [], 0.0, self._count + 1
        began, id = time.perf_counter(), f"r{self._count}"
        self.service.send(prompt(id, tokens, max_tokens, **sampling))
        answer = self.service.finish([id], 600)[id]
        found = self.service.client.ended[id].cached_tokens
        self.forget()
        return answer, self.first_at - began, found

    def logits_of(self, tokens: list[int], count: int) -> torch.Tensor:
        """[count, vocab] of the last tokens but one, as prefill computes them."""
        self.scores_prompt = True
        self.ask(tokens, 1)
        self.scores_prompt = False
        return torch.cat(self.rows[:-1])[-count:]

    def stores_nothing(self) -> None:
        """What is asked from now on is found by nobody."""
        lower = self.service.decode.lower
        if lower is not None:
            lower.keep_prompt = lower.keep_output = lower.returned = lambda *what: None

    def forget(self) -> None:
        """Empties the memory, once all is stored."""
        pool = self.service.pool
        while pool.num_free < pool.num_blocks:
            self.service.woken.wait(0.01)
            self.service.woken.clear()
            self.service.turn()
        pool.clear_cache()


@contextmanager
def bench(model: str, folder: Path | None, mode: str) -> Iterator[Bench]:
    """Until the block ends."""
    made = Bench(model, folder, mode)
    yield made
    made.service.group.close()


def chats(model: str, count: int) -> list[list[int]]:
    """`count` texts of CONTEXT tokens: conversations, with answers sampled from the model itself."""
    tokenizer: TextTokenizer = load_tokenizer(hub.resolve(model))
    texts, end = [], tokenizer.eos_ids[0]
    asked = [
        tokenizer.encode_segments(tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True))
        for text in ASKED
    ]
    with bench(model, None, "cold") as running:
        for seed in range(count):
            text: list[int] = []
            round_ = 0
            while len(text) < CONTEXT:
                ids = [f"{seed}.{round_}.{n}" for n in range(len(asked))]
                for n, (id, head) in enumerate(zip(ids, asked, strict=True)):
                    how = {"temperature": 0.8, "seed": 1_000 * seed + 10 * round_ + n, "ignore_eos": False}
                    running.service.send(prompt(id, head.tolist(), 160, **how))
                for id, answer in running.service.finish(ids, 600).items():
                    turn = asked[ids.index(id)].tolist()
                    text += [*(turn[1:] if text else turn), *answer, *([] if answer[-1:] == [end] else [end])]
                round_ += 1
            texts.append(text[:CONTEXT])
    return texts


def fill(model: str, folder: Path, texts: list[list[int]], mode: str) -> dict[str, int]:
    """Stores all prefixes; returns bytes on disk of the entries of a token and of one state, which it removes."""
    with bench(model, folder, mode) as running:
        for text in texts:
            running.ask(text[: CONTEXT - ANSWER], 1)
        layout, store = running.engine.layout, running.service.decode.lower.tiers[0].store
        found = entries(folder)
        states = [entry for entry in found if entry.namespace.endswith("-state")]
        kept = [entry for entry in found if not entry.namespace.endswith("-state")]
        store.remove([entry.name for entry in states])
    tokens = layout.block_tokens * len(kept)
    return {
        "entries_bytes_per_token": sum(entry.size for entry in kept) // tokens,
        "whole_bytes_per_token": record_size(layout.block_bytes) // layout.block_tokens,
        "state_bytes": states[0].size,
    }


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    """Of distributions [positions, vocab]: KL in nats, and the largest difference of two logits."""
    p, q = wanted.log_softmax(-1), found.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "logit_max": float((wanted - found).abs().max())}


def measure(model: str, texts: list[list[int]], lengths: tuple[int, ...], repeats: int, work: Path) -> dict[str, Any]:
    """Rows by prefix length."""
    sizes: dict[str, int] = {}
    for namespace in ("exact", "bounded"):
        sizes = fill(model, work / namespace, texts, namespace)
    rows: list[dict[str, Any]] = [
        {"prefix": length, "seconds": {}, "found": {}, "exact": [], "bounded": []} for length in lengths
    ]
    wanted: Wanted = {}
    for mode in MODES:
        with bench(model, None if mode == "cold" else work / _namespace(mode), mode) as running:
            running.stores_nothing()
            for row in rows:
                _measure_row(running, mode, row, texts, repeats, wanted)
    for row in rows:
        for mode in ("exact", "bounded"):
            row[mode] = _summed(row[mode])
    return {"sizes": sizes, "rows": rows}


def _namespace(mode: str) -> str:
    return "bounded" if mode == "bounded" else "exact"


def _measure_row(
    running: Bench, mode: str, row: dict[str, Any], texts: list[list[int]], repeats: int, wanted: Wanted
) -> None:
    """All texts at one length. wanted: answers and logits of the cold runs, which come first."""
    length, times = row["prefix"], []
    for number, text in enumerate(texts):
        other = texts[(number + 1) % len(texts)]  # what goes on with another text finds the prefix and no more
        tokens = [*text[:length], *other[50 : 50 + SUFFIX]]
        for _ in range(repeats):
            answer, seconds, row["found"][mode] = running.ask(tokens, ANSWER)
            times.append(seconds)
        told = [*tokens, *(answer if mode == "cold" else wanted[length, number][0])]
        logits = running.logits_of(told, SUFFIX + ANSWER - 1)
        if mode == "cold":
            wanted[length, number] = answer, logits
        elif mode in ("exact", "bounded"):
            cold, cold_logits = wanted[length, number]
            same = sum(a == b for a, b in zip(cold, answer, strict=True)) / ANSWER
            row[mode].append({**divergence(cold_logits, logits), "same": same})
    row["seconds"][mode] = statistics.median(times)


def _summed(found: list[dict[str, float]]) -> dict[str, float]:
    joined: dict[str, float] = {name: max(one[name] for one in found) for name in ("kl_max", "logit_max")}
    return joined | {name: statistics.fmean(one[name] for one in found) for name in ("kl_mean", "same")}


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| prefix | cold | off | exact | bounded | found exact, bounded | KL mean, max | same greedy tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        times = " | ".join(f"{row['seconds'][mode]:.2f} s" for mode in MODES)
        near = row["bounded"]
        lines.append(
            f"| {row['prefix']:,} | {times} | {row['found']['exact']:,}, {row['found']['bounded']:,} | "
            f"{near['kl_mean']:.1e}, {near['kl_max']:.1e} | {100 * near['same']:.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints the table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="flowinfer-mini")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1, help="of each text")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--small", action="store_true", help="two texts, three lengths: for a look")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lengths = (256, 1152) if asked.small else tuple(asked.lengths)
    num_texts = 2 if asked.small else asked.texts
    with tempfile.TemporaryDirectory(prefix="replay-") as work:
        texts = chats(asked.model, num_texts)
        result = measure(asked.model, texts, lengths, asked.repeats, Path(work))
    result = {"machine": machine(), "model": asked.model, "texts": num_texts, **result}
    print(table(result))
    print(json.dumps(result, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
