"""What structured output costs: tables, compiling, and per step the masks of 1, 16 and 64 sequences of SmolLM2.

Run: python tests/bench/bench_grammar.py
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from flowinfer.engine import hub
from flowinfer.engine.grammar import Grammars
from flowinfer.engine.grammar.guidance import GuidanceEngine, check
from flowinfer.engine.sampling import Sampler
from flowinfer.message import Grammar, Sampling
from flowinfer.text.tokenizer import load_tokenizer

STEPS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.[a-z]{2,4}$"},
        "role": {"enum": ["admin", "user", "guest"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}},
    },
    "required": ["name", "age", "mail", "role", "tags", "address"],
    "additionalProperties": False,
}


ANSWER = (
    '{"name": "Ada King", "age": 36, "mail": "ada@lovelace.org", "role": "admin", "tags": ["first", "second"], '
    '"address": {"street": "Main street 12", "city": "London"}}'
)


def timed(fn: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1e3


def step_ms(sampler: Sampler, count: int, grammar: Grammar | None) -> float:
    """Median milliseconds to choose and take a token for `count` greedy sequences, over STEPS steps."""
    vocab = sampler.vocab_size
    rng = np.random.default_rng(0)
    nothing = np.zeros(0, np.int32)
    for slot in range(count):
        sampler.join(slot, Sampling(temperature=0, grammar=grammar), f"r{slot}", nothing, 0)
    slots, starts = np.arange(count, dtype=np.int32), np.arange(count + 1, dtype=np.int32)
    drafts, times = np.zeros((count, 0), np.int32), []
    for step in range(STEPS):
        logits = torch.from_numpy(rng.standard_normal((count, vocab), np.float32))
        began = time.perf_counter()
        chosen = sampler.choose(logits, slots, starts, np.full(count, step, np.int32), drafts)
        for slot in sampler.tracked:
            sampler.advance(slot, chosen[slot : slot + 1].astype(np.int32))
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def masks_ms(engine: GuidanceEngine, grammar: Grammar, ids: list[int]) -> tuple[float, float]:
    """Milliseconds for the masks of 64 sequences along an answer: one after the other, and by llguidance's threads."""
    start = engine.matcher(grammar)
    matchers = [start.deep_copy() for _ in range(64)]
    for place, matcher in enumerate(matchers):
        matcher.try_consume_tokens(ids[: place % len(ids)])
    bits, threads = allocate_token_bitmask(64, engine.vocab_size), LLExecutor(2)
    pairs = [(matcher, place) for place, matcher in enumerate(matchers)]
    serial = [timed(lambda: [matcher.compute_bitmask() for matcher in matchers]) for _ in range(9)]
    parallel = [timed(lambda: fill_next_token_bitmask_par(threads, pairs, bits)) for _ in range(9)]
    return statistics.median(serial), statistics.median(parallel)


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(hub.resolve("smollm2-135m", pull=True))
    made: list[GuidanceEngine] = []
    tables = timed(lambda: made.append(GuidanceEngine.of(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)))
    grammar = Grammar("json", json.dumps(SCHEMA))
    print(f"vocabulary {tokenizer.vocab_size}; tables {tables:.0f} ms, once a decode worker, at the first grammar")
    print(f"check in the front worker {statistics.median(timed(lambda: check(grammar)) for _ in range(20)):.2f} ms")
    compiling = [timed(lambda: made[0].compile(grammar)) for _ in range(10)]
    print(f"compile: first {compiling[0]:.1f} ms, then {statistics.median(compiling[1:]):.1f} ms")
    one, many = masks_ms(made[0], grammar, tokenizer.encode_plain(ANSWER).tolist())
    print(f"masks of 64 sequences: {one:.2f} ms one by one, {many:.2f} ms by llguidance's own two threads")
    grammars = Grammars(lambda: made[0])
    sampler = Sampler(max_slots=64, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_ids, grammars=grammars)
    print(f"{'sequences':>10} {'free ms':>9} {'grammar ms':>11} {'us a row more':>14}")
    for count in (1, 16, 64):
        free, bound = step_ms(sampler, count, None), step_ms(sampler, count, grammar)
        print(f"{count:>10} {free:>9.3f} {bound:>11.3f} {(bound - free) * 1e3 / count:>14.0f}")


if __name__ == "__main__":
    main()
