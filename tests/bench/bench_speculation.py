"""Speculation on real models: how many drafts hold, and what that gives. `python tests/bench/bench_speculation.py`.

First, acceptance by position of the draft, for each drafter, kind of prompt and temperature: all drafts are verified.
Then tokens a second at several numbers of streams: `none`, all drafts (`fixed`), and `confidence`, in turns, each round
in another order. Every way keeps what it learned from round to round, as a service does. A run counts from the first
step that gave every stream a token to the first end. Intervals are 95 %, of the rounds' ratios (Student's t on
logarithms).

Kinds that begin with `own` are prompts of the templates that flowinfer-mini was trained on, from another seed. The
calibration error is that of the product of confidences up to each place, as the schedule believes them, in the text
that the model writes itself.

`--json FILE` writes all figures; `--quick` is a run of a minute that shows only that it works.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine

from flowinfer.bench.service import Arrival, EngineService
from flowinfer.compare.figures import student_t
from flowinfer.engine import heads, hub
from flowinfer.message import Ids
from flowinfer.stages.spec_verify.drafting import Drafting
from flowinfer.stages.spec_verify.sources import make_drafter
from flowinfer.text.tokenizer import load_tokenizer
from flowinfer.train.prepare import templates
from flowinfer.train.speculate import KINDS, calibration_error

PROMPTS = {
    "chat": (
        "What is a healthy breakfast for a child?",
        "Can you explain how rain forms?",
        "I want to learn the guitar. How should I start?",
        "What are three good habits for saving money?",
        "Why is sleep important for the body?",
        "How do I plant tomatoes in a small garden?",
        "Tell me the difference between a lake and a river.",
        "What should I pack for a weekend in the mountains?",
        "How can I be a better listener?",
        "What makes bread rise?",
    ),
    "code-like": (
        "Write a Python function that adds two numbers, one that subtracts them and one that multiplies them.",
        "Write an HTML page with a list of five fruits.",
        "Give me a JSON list of four people with name, age and city.",
        "Write a Python class Animal with a method speak, and classes Dog and Cat that inherit from it.",
        "Write a table in Markdown with the days of the week and the number of hours worked on each.",
        "Write SQL that creates a table users with id, name and email, and inserts three rows.",
        "Write a for loop in C that prints the numbers from 1 to 10, then one that prints them backwards.",
        "Repeat this list in alphabetical order, one a line: pear, apple, fig, kiwi, plum, grape, lemon, melon.",
        "Write a Python dictionary that maps the months to their number of days.",
        "Write a shell script that makes three folders and puts an empty file into each.",
    ),
    "story": (
        "Write a short story about a fox who wants to fly.",
        "Tell me a story about a lighthouse keeper and a storm.",
        "Write a story about two friends who find a map.",
        "Tell a bedtime story about a bear who can't sleep.",
        "Write about a girl who plants a seed that grows overnight.",
        "Tell me a tale of a king who lost his crown.",
        "Write a story about the first day of school.",
        "Tell a story about an old boat and the sea.",
        "Write a story about a robot who learns to paint.",
        "Tell me about a village where it never rained.",
    ),
}
DRAFTERS = ("head", "ngram", "suffix")
OWN = "own "
OWN_KINDS = [OWN + kind for kind in (*KINDS.values(), "mix")]


def own_prompts(count: int = 1000, seed: int = 4711) -> dict[str, tuple[str, ...]]:
    """By kind, and all as they were mixed; training drew other numbers, but short ones may have come there too."""
    found: dict[str, dict[str, None]] = {kind: {} for kind in OWN_KINDS}
    for chat in templates(count, random.Random(seed)):
        found[OWN + KINDS[chat.kind]][chat.user] = None
        found[f"{OWN}mix"][chat.user] = None
    return {kind: tuple(texts) for kind, texts in found.items()}


@dataclass(frozen=True)
class Acceptance:
    """held[j]: share of the verified drafts at place j that held. accepted: of the drafts of a verified block, mean.

    drafted: share of a sequence's steps that verified any. per_step: accepted drafts of any step, mean.
    error[j]: calibration error of the product of confidences up to place j; none where the drafter gives none.
    """

    drafter: str
    kind: str
    temperature: float
    held: list[float]
    accepted: float
    drafted: float
    per_step: float
    num_tokens: int
    error: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """Speed over another's with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Speed:
    """Tokens a second of each round, and ratios: to `none`, and of `confidence` to the better of the other two."""

    way: str
    streams: int
    rounds: list[float] = field(default_factory=list)
    to_none: Ratio | None = None
    to_better: Ratio | None = None
    drafts_a_step: float = 0.0  # verified, of a sequence
    accepted_a_step: float = 0.0


class Tally:
    """Takes the place of spec-verify's metrics. places [2, 8]: drafts that were verified and that held, by place."""

    def __init__(self) -> None:
        self.places = np.zeros((2, 8))
        self.num_blocks = 0
        self._judged: list[tuple[Any, Ids, Ids]] = []

    def count(self, num_drafts: Ids, accepted: Ids) -> None:
        self.num_blocks += int(np.count_nonzero(num_drafts))
        for row, numbers in enumerate((num_drafts, accepted)):
            self.places[row] += (np.arange(8) < numbers[:, None]).sum(0)

    def calibrate(self, confidences: Any, hits: Ids, trials: Ids) -> None:
        """confidences [n, D] and how many drafts came true, of those that were put to the test."""
        self._judged.append((confidences.copy(), hits.copy(), trials.copy()))

    def errors(self) -> list[float]:
        """Of the product of confidences up to each place, over all whose fate is known."""
        if not self._judged:
            return []
        confidences, hits, trials = (np.concatenate(parts) for parts in zip(*self._judged, strict=True))
        products, failed = np.cumprod(confidences, 1), trials > hits
        found = []
        for place in range(confidences.shape[1]):
            known = failed | (hits > place)
            found.append(calibration_error(products[known, place].astype(np.float64), (hits > place)[known] * 1.0))
        return found


class Bench:
    """One service; `use` changes how it drafts between runs, and keeps what each way has learned."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = hub.resolve(args.model)
        self.tokenizer = load_tokenizer(self.folder)
        most, longest = max(*args.streams, args.batch), 128 + max(args.tokens, args.answer)
        self.service = EngineService(
            args.model,
            device=args.device,
            dtype=args.dtype,
            num_blocks=most * (longest // 64 + 3),
            max_batch=most,
            max_tokens=longest + 64,
            chunk=8192,
        )
        self.verify: Any = self.service.group.by_name["verify"].stage
        self.known: dict[str, Drafting] = {}
        self.texts = PROMPTS | own_prompts()

    def use(self, draft: str, schedule: str = "fixed", tokens: int = 5, fresh: bool = False) -> None:
        """Drafts this way from now on."""
        name, batch = f"{draft} {schedule} {tokens}", self.verify.batch
        if fresh or name not in self.known:
            named = {"draft_model": self.args.draft_model, "head": self.args.head}
            config = self.verify.Config(draft=draft, tokens=tokens, schedule=schedule, **named)
            self.verify._draft_by(config, make_drafter(config, batch))
            self.known[name] = self.verify.drafting
            self.known[name].counters = Tally()
        self.verify.drafting = self.known[name]
        self.verify.drafting.lead()

    def prompts(self, kinds: Sequence[str], count: int, first: int = 0) -> list[Any]:
        """So many of these kinds in turn, from number `first` on; those that come again begin with other words."""
        found = []
        for i in range(first, first + count):
            texts = self.texts[kinds[i % len(kinds)]]
            again, number = divmod(i // len(kinds), len(texts))
            text = texts[number] if not again else f"({again + 1}) {texts[number]}"
            segments = self.tokenizer.render([{"role": "user", "content": text}])
            found.append(self.tokenizer.encode_segments(segments))
        return found

    # ---------------------------------------------------------------------------------------------------- acceptance

    def acceptance(self, drafter: str, kind: str, temperature: float) -> Acceptance:
        """Answers all prompts of the kind, `batch` at a time."""
        self.use(drafter, fresh=True)
        steps, tokens, accepted = 0, 0, 0
        most = (
            len(self.texts[kind]) if kind.startswith(OWN) else self.args.prompts
        )  # with other words they'd be others'
        prompts = self.prompts([kind], min(most, self.args.prompts))
        for start in range(0, len(prompts), self.args.batch):
            part = prompts[start : start + self.args.batch]
            arrivals = self.service.answer(
                part, self.args.answer, temperature=temperature, ignore_eos=False, seed=start
            )
            steps += sum(arrival.num_sequences for arrival in arrivals)
            for finish in self.service.client.ended.values():
                tokens += finish.completion_tokens
                accepted += finish.accepted_tokens
        tally: Any = self.verify.drafting.counters
        (verified, held), blocks = tally.places, tally.num_blocks
        return Acceptance(
            drafter,
            kind,
            temperature,
            [float(h / v) if v else 0.0 for h, v in zip(held, verified, strict=True)],
            accepted / max(1, blocks),
            blocks / max(1, steps),
            accepted / max(1, steps),
            tokens,
            tally.errors(),
        )

    # --------------------------------------------------------------------------------------------------------- speed

    def speeds(self, streams: int, ways: Sequence[tuple[str, str]]) -> list[Speed]:
        """All ways at this load, in turns."""
        found = {way: Speed(_name(*way), streams) for way in ways}
        for number in range(-1, self.args.rounds):  # the first teaches
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                self.use(*way)
                speed = self._run(streams, number + 1)
                if number >= 0:
                    found[way].rounds.append(speed)
                    found[way].drafts_a_step += self.drafts_a_step / self.args.rounds
                    found[way].accepted_a_step += self.accepted_a_step / self.args.rounds
        for (drafter, schedule), speed in found.items():
            if drafter == "none":
                continue
            plain, fixed = found["none", "fixed"].rounds, found[drafter, "fixed"].rounds
            speed.to_none = ratio(speed.rounds, plain)
            if schedule == "confidence":
                better = plain if statistics.fmean(plain) > statistics.fmean(fixed) else fixed
                speed.to_better = ratio(speed.rounds, better)
        return list(found.values())

    def _run(self, streams: int, number: int) -> float:
        """Each round has prompts and seeds of its own: a tenant's outputs seldom come twice word for word."""
        temperature, prompts = self.args.temperatures[-1], self.prompts(self.args.kinds, streams, number * streams)
        arrivals = self.service.answer(prompts, self.args.tokens, temperature=temperature, seed=number)
        ends = self.service.client.ended.values()
        steps = max(1, sum(arrival.num_sequences for arrival in arrivals))
        self.drafts_a_step = sum(finish.drafted_tokens for finish in ends) / steps
        self.accepted_a_step = sum(finish.accepted_tokens for finish in ends) / steps
        return full_speed(arrivals, streams)


def full_speed(arrivals: Sequence[Arrival], streams: int) -> float:
    """Tokens a second while all streams run: from the first step with all of them to the last before an end."""
    first = next(i for i, arrival in enumerate(arrivals) if arrival.num_sequences == streams)
    last = next(i for i, arrival in enumerate(arrivals) if arrival.num_ended) - 1
    if last <= first:
        raise SystemExit("the streams ended before all of them ran together: raise --tokens")
    return sum(a.num_tokens for a in arrivals[first + 1 : last + 1]) / (arrivals[last].at - arrivals[first].at)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of two ways that ran in turns, round by round."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    middle, count = statistics.fmean(logs), len(logs)
    reach = student_t(0.975, count - 1) * statistics.stdev(logs) / math.sqrt(count) if count > 1 else math.inf
    return Ratio(*(math.exp(min(value, 50.0)) for value in (middle, middle - reach, middle + reach)))


def _name(drafter: str, schedule: str) -> str:
    return drafter if drafter == "none" else f"{drafter}, {schedule}"


def acceptance_table(rows: Sequence[Acceptance]) -> Iterator[str]:
    names = "accepted of a draft | a step | held at place 1, 2, ... | error of confidence"
    yield f"| drafter | prompts | temperature | {names} |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        held = " ".join(f"{share:.2f}" for share in row.held if share)
        error = " ".join(f"{each:.2f}" for each in row.error)
        figures = f"{row.temperature:g} | {row.accepted:.2f} | {row.per_step:.2f} | {held} | {error}"
        yield f"| {row.drafter} | {row.kind} | {figures} |"


def speed_table(rows: Sequence[Speed]) -> Iterator[str]:
    yield "| streams | way | tokens/s | to none | to the better of none and fixed | drafts, accepted a step |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        speed = statistics.fmean(row.rounds)
        drafts = f"{row.drafts_a_step:.2f}, {row.accepted_a_step:.2f}" if row.to_none else ""
        yield (f"| {row.streams} | {row.way} | {speed:,.0f} | {row.to_none or ''} | {row.to_better or ''} | {drafts} |")


def drafters_of(args: argparse.Namespace) -> list[str]:
    """Those that are asked for and can be had."""
    found = []
    for name in args.drafters:
        if name == "head" and not args.head and heads.shipped(args.model) is None:
            print(f"{args.model} has no draft head: left out")
        elif name == "model" and not args.draft_model:
            print("--draft-model names none: left out")
        else:
            found.append(name)
    return found


def split(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads parts between commas."""
    return lambda text: [of(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flowinfer-mini")
    parser.add_argument("--draft-model", default="", help="for the drafter `model`")
    parser.add_argument("--head", default="", help="file of the draft head; by default the model's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--drafters", type=split(str), default=list(DRAFTERS))
    parser.add_argument(
        "--kinds",
        type=split(str),
        default=list(PROMPTS),
        help=f"of prompts, in the speed runs in turn; also {', '.join(OWN_KINDS)}",
    )
    parser.add_argument("--temperatures", type=split(float), default=[0.0, 0.7], help="speed is taken at the last")
    parser.add_argument("--prompts", type=int, default=20, help="of each kind, for acceptance")
    parser.add_argument("--answer", type=int, default=128, help="longest answer, for acceptance")
    parser.add_argument("--batch", type=int, default=8, help="sequences at once, for acceptance")
    parser.add_argument("--streams", type=split(int), default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, for speed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["acceptance", "speed"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.answer, args.streams, args.tokens, args.rounds = 2, 16, [1, 3], 12, 2
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    bench, drafters = Bench(args), drafters_of(args)
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else machine()
    dtype = str(bench.service.engine.model.dtype).removeprefix("torch.")
    print(f"{args.model}, {dtype}, {args.threads} threads, {name}\n", flush=True)
    accepted: list[Acceptance] = []
    speeds: list[Speed] = []
    if args.only != "speed":
        cases = itertools.product(drafters, args.kinds, args.temperatures)
        accepted = [bench.acceptance(*case) for case in cases]
        print("\n".join(acceptance_table(accepted)), "\n", flush=True)
    if args.only != "acceptance":
        ways = [("none", "fixed"), *itertools.product(drafters, ("fixed", "confidence"))]
        for streams in args.streams:
            speeds += bench.speeds(streams, ways)
            print(f"{streams} streams done", flush=True)
        print("\n".join(speed_table(speeds)))
    bench.service.close()
    if args.json:
        report = {
            "model": args.model,
            "dtype": dtype,
            "machine": name,
            "threads": args.threads,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "settings": {key: str(value) for key, value in vars(args).items()},
            "acceptance": [asdict(row) for row in accepted],
            "speed": [asdict(row) for row in speeds],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
