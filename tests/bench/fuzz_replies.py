"""Fuzzes what reads answers: tokens, bytes and split points; the same answer must come out however it was cut.

Run: python tests/bench/fuzz_replies.py [--seconds 600] [--seed 0]. Exit code 1 and the case, where something was found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowinfer.message import Finish, Opening, Piece, ReplyFormat, Sampling
from flowinfer.stages.detokenize.policy import Stream
from flowinfer.text.incremental import Glyphs
from flowinfer.text.reply import markers_of
from flowinfer.text.reply.formats import TOOL_FORMATS

FORMATS = ("", *TOOL_FORMATS, "harmony")
STRINGS = {"look": ("city", "code")}
ARGUMENTS = [
    '{"city": "Paris \\"}{", "n": [1, {"a": "]"}]}',
    "{}",
    '{"code": "é🙂\\n日本"}',
    '{"a": {"b": {}}}',
    '{"x":',
    "nul",
]
WORDS = [
    "<think>", "</think>", "{", "}", '"', "\\", "[", "]", ",", ":", '"name"', '"arguments"', '"parameters"', " ", "\n",
    "<", ">", "/", "look", "city", "é", "｜", "🙂", "日本", "\0", "\r\n", "STOP", "ST", "OP", "\u2028", "```", "null",
]  # fmt: skip
STOPS = (("STOP",), ("\n\n", "STOP"), ("</tool",), ("🙂", '"}'), ("ab", "abc"))


def sample_calls(name: str, rng: random.Random) -> str:
    """Some calls as a model writes them in this format."""
    if name == "harmony":
        head = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        return "<|channel|>analysis<|message|>So.<|end|><|start|>assistant" + head + rng.choice(ARGUMENTS) + "<|call|>"
    written = TOOL_FORMATS[name].written
    calls = []
    for _ in range(rng.randrange(1, 4)):
        head = written.head.replace("{name}", "look")
        if written.text is None or written.other is None:
            calls.append(head + rng.choice(ARGUMENTS) + written.tail)
            continue
        body = "".join(
            kind[0].replace("{key}", rng.choice(["city", "code", "n"]))
            + rng.choice([*ARGUMENTS, "Rome", "3"])
            + kind[1]
            for kind in rng.choices([written.text, written.other], k=rng.randrange(3))
        )
        calls.append(head + body + written.tail)
    return written.before + written.between.join(calls) + written.after


def answer(name: str, rng: random.Random) -> bytes:
    """An answer in this format, more or less spoilt."""
    parts = [
        rng.choice(["", "<think>So it is.</think>\n\n", "<think>", "So.</think>"]),
        rng.choice(["", "Let me see. "]),
    ]
    parts += [sample_calls(name, rng)] * rng.randrange(2) if name else []
    markers = [
        *WORDS,
        *sorted(markers_of(ReplyFormat(tools=name, reasoning="harmony" if name == "harmony" else "think"))),
    ]
    parts += rng.choices(markers, k=rng.randrange(12))
    if rng.random() < 0.1:  # a model that loops, past all that a name or a header may take
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(markers) * rng.randrange(1200))
    text = "".join(parts)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            text = text[:at] + rng.choice(markers) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + rng.randrange(1, 9) :]
        elif kind == 2:
            text = text[:at]
        else:
            text = text[:at] + text[rng.randrange(at + 1) : at] + text[at:]
    data = text.encode()
    if rng.random() < 0.3 and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes(rng.choices(range(256), k=rng.randrange(1, 4))) + data[at + rng.randrange(3) :]
    return data


def cut(length: int, rng: random.Random, most: int) -> list[int]:
    """Sizes of pieces that come to `length`."""
    sizes = []
    while length > 0:
        sizes.append(min(length, rng.randrange(1, most + 1)))
        length -= sizes[-1]
    return sizes


@dataclass(frozen=True)
class Message:
    """What a client has at the end."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    stopped: str | int | None


def told(pieces: Iterable[Piece]) -> Message:
    """The pieces joined as a client joins them. Raises AssertionError for a call that is no call."""
    reasoning, text, calls = "", "", dict[int, list[str]]()
    stop: str | int | None = None
    for piece in pieces:
        reasoning, text = reasoning + piece.reasoning, text + piece.text
        for part in piece.calls:
            assert bool(part.name) == bool(part.id) == (part.index not in calls), "a call opens once, with name and id"
            assert part.index in calls or part.index == len(calls), "calls are numbered as they come"
            calls.setdefault(part.index, [part.id, part.name, ""])[2] += part.arguments
        stop = piece.finish.stop if piece.finish else stop
    assert len({id for id, _, _ in calls.values()}) == len(calls), "ids of calls are unique"
    return Message(reasoning, text, tuple((a, b, c) for a, b, c in calls.values()), stop)


def read(data: bytes, form: ReplyFormat | None, stops: tuple[str, ...], tokens: list[int], steps: list[int]) -> Message:
    """Reads bytes cut into tokens of these sizes, so many of them a step, the last with the end."""
    table, at = [], 0
    for size in tokens:
        table.append(data[at : at + size])
        at += size
    glyphs = Glyphs([*table, b""])
    stream = Stream(
        Opening(id="x", sampling=Sampling(stop=stops, reply=form), prompt_tokens=1, cached_tokens=0), glyphs
    )
    pieces, first = [], 0
    for number, size in enumerate(steps):
        ids = list(range(first, first + size))
        first += size
        last = number == len(steps) - 1
        if last:
            ids.append(len(table))
        finish = Finish(reason="stop", stop=len(table)) if last else None
        if (piece := stream.advance(ids, (), finish)) is not None:
            pieces.append(piece)
        if stream.cut:
            break
    return told(pieces)


def one(rng: random.Random) -> str | None:
    """One case: what is wrong with it, None if nothing is."""
    name = rng.choice(FORMATS)
    reasoning = "harmony" if name == "harmony" else rng.choice(["", "think"])
    thinking = reasoning == "think" and rng.random() < 0.3
    form = (
        ReplyFormat(reasoning=reasoning, tools=name, thinking=thinking, strings=STRINGS) if name or reasoning else None
    )
    stops = rng.choice(STOPS) if rng.random() < 0.4 else ()
    data = answer(name, rng) or b" "
    whole = [1] * len(data)
    try:
        expected = read(data, form, stops, whole, [len(data)])
        for most_token, most_step in ((1, 1), (3, 2), (9, 5)):
            tokens = cut(len(data), rng, most_token)
            got = read(data, form, stops, tokens, cut(len(tokens), rng, most_step))
            if _seen(got) != _seen(expected):
                return f"{form} {stops} {data!r}: {got} for tokens of {tokens}, {expected} as single bytes"
    except Exception as error:  # whatever is raised is a finding
        return f"{form} {stops} {data!r}: {type(error).__name__}: {error}"
    return None


def _seen(message: Message) -> tuple[object, ...]:
    """What doesn't hang on how text was cut into tokens: the id of an ending token does."""
    return (message.reasoning, message.text, message.calls, isinstance(message.stopped, str) and message.stopped)


def fuzz(seed: int, *, seconds: float = 0.0, cases: int = 0) -> tuple[int, str | None]:
    """Runs so many cases or so long: how many there were, and what was found."""
    end, count = time.monotonic() + seconds, 0
    while count < cases if cases else time.monotonic() < end:
        count += 1
        if (found := one(random.Random(f"{seed}/{count}"))) is not None:
            return count, f"seed {seed}, case {count}: {found}"
    return count, None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    count, found = fuzz(given.seed, seconds=given.seconds)
    print(json.dumps({"cases": count, "seconds": given.seconds, "found": found}, ensure_ascii=False))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
