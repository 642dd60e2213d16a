"""Time to first token of an agent's session whose context grows: cold, and with its prefix found in each tier.

PYTHONPATH=. python tests/bench/bench_session.py [--turns 30] [--tokens 130] [--json FILE]

One service answers all turns, one after the other. Then, at a third of the session and at its end, the same prompt
again: from the pool of the worker that computed it, from the memory of another worker (the first one is busy), and cold
(a salt of its own, nothing kept). Then the whole service starts anew for each measurement: with its disk tier, and with
an empty disk and the object tier. The text must be the same every time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import Service, Stream, english, machine, prompt_ids, service

OUTPUT = 16
SETTINGS = (
    "vars.model=smollm2-135m",  # whose context holds such a session
    "stages.prefill.with.dtype=float32",
    "vars.prefill_workers=2",
    "workers.prefill.threads=1",
    "workers.decode.threads=1",
    "stages.lookup.with.tiers.memory=3GiB",  # each of two prefill workers is promised half of decode's blocks
    "stages.lookup.with.tiers.write=all",
)


@dataclass
class Mark:
    """Prompt of a turn, its answer, and seconds to the first token by where the prefix was found; tokens found."""

    turn: int
    prompt: str
    text: str = ""
    num_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)

    def note(self, way: str, stream: Stream) -> None:
        """Keeps a measurement; raises where the text is another."""
        if self.text and stream.text != self.text:
            raise SystemExit(f"turn {self.turn}, {way}: {stream.text!r} instead of {self.text!r}")
        self.text = stream.text
        self.num_tokens = stream.usage["prompt_tokens"]
        self.seconds[way] = stream.ttft
        self.found[way] = (stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def play(running: Service, turns: int, tokens: int) -> tuple[list[float], list[Mark]]:
    """The session: seconds to the first token of each turn, and the two turns that are measured again."""
    context, waits, marks = "", [], []
    for turn in range(1, turns + 1):
        context += f"\n\nTurn {turn}. " + english(tokens, turn)
        stream = running.complete(context, OUTPUT)
        waits.append(stream.ttft)
        if turn in (max(1, turns // 3), turns):
            mark = Mark(turn, context, stream.text)
            marks.append(mark)
        context += stream.text
    return waits, marks


def again(running: Service, mark: Mark) -> None:
    """From the pool, from the memory of another worker, and cold."""
    mark.note("pool", running.complete(mark.prompt, OUTPUT))
    busy = threading.Thread(target=running.complete, args=(prompt_ids(3000, 1), 1), kwargs={"cache_salt": "busy"})
    busy.start()
    mark.note("memory", running.complete(mark.prompt, OUTPUT))
    busy.join()
    cold: dict[str, Any] = {"cache_salt": uuid.uuid4().hex, "cache_retention": 0}
    mark.note("cold", running.complete(mark.prompt, OUTPUT, **cold))


def restored(mark: Mark, way: str, kv: Path, objects: Path) -> None:
    """From one tier, after a start of the whole service."""
    with service("prod.yaml", *SETTINGS, *tiers(objects), kv=kv) as running:
        running.complete("Hello", 2, cache_retention=0)  # the first request of a process is slow by itself
        mark.note(way, running.complete(mark.prompt, OUTPUT, cache_retention="1h"))


def tiers(objects: Path) -> tuple[str, ...]:
    """Settings of the tiers; the path of the disk comes by the environment."""
    return (f"stages.lookup.with.tiers.object.url=file://{objects}",)


def measure(turns: int, tokens: int, kv: Path, objects: Path) -> tuple[list[float], list[Mark]]:
    """All of it; `kv` and `objects` are empty folders."""
    with service("prod.yaml", *SETTINGS, *tiers(objects), kv=kv) as running:
        waits, marks = play(running, turns, tokens)
        for mark in marks:
            again(running, mark)
    for mark in marks:
        restored(mark, "disk", kv, objects)
        with tempfile.TemporaryDirectory(prefix="no-kv-", ignore_cleanup_errors=True) as empty:
            restored(mark, "object", Path(empty), objects)
    return waits, marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=130)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="session-", ignore_cleanup_errors=True) as folder:
        waits, marks = measure(args.turns, args.tokens, Path(folder, "kv"), Path(folder, "objects"))
    print(
        f"turns as they came: first token after {statistics.median(waits):.2f} s (median), {max(waits):.2f} s at most"
    )
    print(f"{'turn':>5} {'tokens':>7} {'way':>8} {'found':>6} {'first token':>12} {'of cold':>9}")
    for mark in marks:
        for way, seconds in mark.seconds.items():
            ratio = mark.seconds["cold"] / seconds
            print(
                f"{mark.turn:>5} {mark.num_tokens:>7} {way:>8} {mark.found[way]:>6} {seconds:>10.3f} s {ratio:>8.1f}x"
            )
    if args.json:
        result = {"machine": machine(), "waits": waits, "marks": [asdict(mark) for mark in marks]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
