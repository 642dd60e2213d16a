"""Host work of spec-verify per decode step, outside the model: `python tests/bench/bench_verify.py`.

argmax and sampling are shown apart: they read every logit, so they grow with the vocabulary and move to the GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flowinfer.engine.batch import Batch
from flowinfer.message import Logits, Proposal, Sampling, Sequence
from flowinfer.stages.spec_verify.stage import SpecVerify

VOCAB, HISTORY = 49_152, 8_192
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}


CONFIGS = {
    "none": SpecVerify.Config(draft="none"),
    "ngram": SpecVerify.Config(draft="ngram"),
    "forced": SpecVerify.Config(draft="ngram", row_cost=0.0),  # drafts wherever a guess is found
    "suffix": SpecVerify.Config(draft="suffix", schedule="fixed"),
}


class Decoder:
    """A stage with a batch of `slots` long sequences, fed with logits that are peaked as a model's are."""

    def __init__(self, slots: int, draft: str, sampling: dict[str, Any], history: int = HISTORY) -> None:
        self.batch = Batch(
            max_slots=slots,
            max_tokens=history + 4_096,
            max_drafts=8,
            block_tokens=64,
            eos_token_ids=(0,),
            vocab_size=VOCAB,
            on_finish=lambda slot: None,
        )
        ctx: Any = SimpleNamespace(stage="verify", shared=lambda key, make: self.batch, fail=print)
        self.stage = SpecVerify(CONFIGS[draft], ctx)
        self.stage.open()
        self.sampled = 0.0
        self._time_sampling()
        generator = np.random.default_rng(0)
        for i in range(slots):
            # a quarter of the pairs repeat, so that about every second look-up finds something
            text = generator.integers(1, 200, history).astype(np.int32)
            settings = Sampling(max_tokens=4_096, ignore_eos=True, **sampling)
            self.batch.add(Sequence(id=f"request-{i}", tokens=text, sampling=settings), text, np.empty(0, np.int32))
        self.slots = np.arange(slots, dtype=np.int32)
        rows = torch.randn(slots * 5, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5
        rows[torch.arange(slots * 5), torch.randint(1, 200, (slots * 5,))] = 14.0
        self.rows = rows
        self.counts = np.ones(slots, np.int32)
        self.num_rows: list[int] = []

    def _time_sampling(self) -> None:
        choose = self.stage.sampler.choose

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            chosen = choose(*args)
            self.sampled = time.perf_counter() - start
            return chosen

        self.stage.sampler.choose = timed  # type: ignore[method-assign]

    def step(self, number: int) -> tuple[float, float]:
        """Seconds of the whole step, and of sampling in it."""
        starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        self.num_rows.append(int(starts[-1]))
        shift = number % self.slots.size
        message = Logits(step=number, slots=self.slots, starts=starts, logits=self.rows[shift : shift + starts[-1]])
        start = time.perf_counter()
        out = list(self.stage.step([message]))
        took = time.perf_counter() - start
        proposal = next(item for item in out if isinstance(item, Proposal))
        self.counts = np.minimum(proposal.counts, 4)
        return took, self.sampled


def measure(slots: int, draft: str, kind: str, steps: int) -> list[str]:
    """A row of the table: medians in milliseconds."""
    decoder = Decoder(slots, draft, KINDS[kind])
    for number in range(5):
        decoder.step(number)
    times = [decoder.step(number) for number in range(5, 5 + steps)]
    rest = statistics.median(whole - sampled for whole, sampled in times)
    sampled = statistics.median(sampled for _, sampled in times)
    rows = statistics.fmean(decoder.num_rows[5:])
    return [str(slots), draft, kind, f"{rows:.0f}", f"{rest * 1e3:.3f}", f"{sampled * 1e3:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="profile a greedy batch of 64 instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        decoder = Decoder(64, "forced", KINDS["greedy"])
        decoder.step(0)
        with cProfile.Profile() as profile:
            for number in range(1, 200):
                decoder.step(number)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    cases = [(slots, draft, "greedy") for slots in (1, 16, 32, 64) for draft in CONFIGS]
    cases += [(64, "none", kind) for kind in KINDS if kind != "greedy"]
    print(f"vocabulary {VOCAB:,}, history {HISTORY:,} tokens, medians in ms")
    print(f"{'batch':>5} {'draft':>6} {'sampling':>20} {'rows':>5} {'host':>7} {'sampling':>9}")
    for case in cases:
        print("{:>5} {:>6} {:>20} {:>5} {:>7} {:>9}".format(*measure(*case, arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
