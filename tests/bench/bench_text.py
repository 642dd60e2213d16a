"""How long text takes in the front worker: a chat to ids, a decode step of 64 sequences to text, answers taken apart.

Run: python tests/bench/bench_text.py [model]. Prints medians and the fastest of many rounds; one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flowinfer.engine.hub import resolve
from flowinfer.fakes import FakeContext
from flowinfer.message import Call, Finish, Opening, ReplyFormat, Sampling, Tokens
from flowinfer.stages.detokenize.stage import Detokenize
from flowinfer.stages.recipe_tokenize.stage import RecipeTokenize
from flowinfer.text.reply import open_parser
from flowinfer.text.reply.formats import TOOL_FORMATS
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

PROSE = "The quick brown fox jumps over the lazy dog, and some more prose stands here to be read by a model. "


def measure(name: str, fn: Callable[[], object], rounds: int) -> None:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    print(f"{name:<58} {statistics.median(times):9.3f} {min(times):9.3f}")


def bench_chat(tokenizer: TextTokenizer, context: Any) -> None:
    chat = [{"role": ("user", "assistant")[n % 2], "content": PROSE * 8} for n in range(11)]
    stage = RecipeTokenize(RecipeTokenize.Config(), context)
    stage.use(tokenizer)
    call = Call(id="a", sampling=Sampling(), messages=chat)
    (prompt,) = stage.step([call])
    measure(f"chat to ids, {len(prompt.tokens)} tokens", lambda: stage.step([call]), 200)
    measure("  of which rendering", lambda: tokenizer.render(chat), 200)


def bench_step(tokenizer: TextTokenizer, context: Any, num_tokens: int, stops: tuple[str, ...]) -> None:
    stage = Detokenize(Detokenize.Config(), context)
    stage.use(tokenizer)
    ids = [f"request-{n}" for n in range(64)]
    text = tokenizer.encode_plain(PROSE + "Grüße, 你好 🙂").tolist()
    opened = [Opening(id=i, sampling=Sampling(stop=stops), prompt_tokens=9, cached_tokens=0) for i in ids]
    counts = np.full(64, num_tokens, np.int32)
    flat = (text * 64)[: 64 * num_tokens]
    stage.step([Tokens(step=0, ids=ids, counts=counts * 0, tokens=counts[:0], opened=opened)])
    step = Tokens(step=1, ids=ids, counts=counts, tokens=np.array(flat, np.int32))
    stops_text = f", {len(stops)} stop strings" if stops else ""
    measure(f"step of 64 sequences, {num_tokens} token(s) each{stops_text}", lambda: stage.step([step]), 500)
    stage.step([Tokens(step=2, ids=ids, counts=counts * 0, tokens=counts[:0], finished=dict.fromkeys(range(64), _END))])


def answer_of(name: str, num_chars: int) -> str:
    """A long answer in this format: reasoning, text, a call with a long value, in about equal parts."""
    part = (PROSE * (num_chars // len(PROSE) // 3 + 1))[: num_chars // 3]
    if name == "harmony":
        head = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|end|><|start|>"
        call = "assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        return head.format(part, part) + call + json.dumps({"city": part}) + "<|call|>"
    written = TOOL_FORMATS[name].written
    if written.text is None:
        value = json.dumps({"city": part})
    else:
        value = written.text[0].replace("{key}", "city") + part + written.text[1]
    said = "" if TOOL_FORMATS[name].at_start else part
    call = written.before + written.head.replace("{name}", "look") + value + written.tail + written.after
    return f"<think>{part}</think>\n\n{said}{call}"


def bench_parsers() -> None:
    """Megabytes a second of one stream, of CPU time, in pieces of a token's usual four characters."""
    print(f"\n{'parser, MB/s of one stream':<58} {'median':>9} {'slowest':>9} {'looping':>9}")
    for name in (*TOOL_FORMATS, "harmony"):
        text = answer_of(name, 200_000)
        pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
        reasoning = "harmony" if name == "harmony" else "think"
        form = ReplyFormat(reasoning=reasoning, tools=name, strings={"look": ("city",)})
        speeds = []
        for _ in range(5):
            parser = open_parser(form, call_prefix="x")
            start = time.process_time()
            for piece in pieces:
                parser.push(piece)
                parser.delta.clear()
            parser.finish()
            speeds.append(len(text.encode()) / 1e6 / (time.process_time() - start))
            assert parser.delta.num_calls == 1, name
        print(f"{name:<58} {statistics.median(speeds):9.2f} {min(speeds):9.2f} {looping(form):9.2f}")


def looping(form: ReplyFormat) -> float:
    """Megabytes a second of CPU time on the worst of a model's loops: a mark for ever, in text and in a call."""
    written = TOOL_FORMATS[form.tools].written if form.tools in TOOL_FORMATS else None
    heads = ["<|channel|>", "<|channel|>final<|message|>"]
    if written is not None:
        heads = ["", written.before, written.before + written.head.replace("{name}", "look")]
    worst = float("inf")
    for head in heads:
        for mark in ("a", "<", "{", "[", " ", "\n", '"\\'):
            text = head + mark * (50_000 // len(mark))
            parser, start = open_parser(form, call_prefix="x"), time.process_time()
            for at in range(0, len(text), 4):
                parser.push(text[at : at + 4])
                parser.delta.clear()
            worst = min(worst, len(text.encode()) / 1e6 / (time.process_time() - start))
    return worst


_END = Finish(reason="length")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    context: Any = FakeContext()
    tokenizer = load_tokenizer(resolve(model))
    print(f"{'milliseconds, ' + model:<58} {'median':>9} {'fastest':>9}")
    bench_chat(tokenizer, context)
    bench_step(tokenizer, context, 1, ())
    bench_step(tokenizer, context, 1, ("\n\n", "User:", "###"))
    bench_step(tokenizer, context, 4, ())
    bench_parsers()


if __name__ == "__main__":
    main()
