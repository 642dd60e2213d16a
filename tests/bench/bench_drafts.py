"""What a decode step with drafts takes on a card: `python tests/bench/bench_drafts.py --config qwen3-8b --json FILE`.

Random weights. Four ways at each batch size: no drafts; looked up by the steps themselves, one ahead of the host; made
by the host and verified by a captured step; the same by an eager step. The host's drafts are worthless, so that a step
gives one token; every sequence has all of them. ms a step, and the host's own part where it runs beside the device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowinfer.bench.service import EngineService
from flowinfer.engine.batch import Batch
from flowinfer.engine.models.named import write_random
from flowinfer.message import Ids
from flowinfer.stages.moe_decode.overlap import Overlap
from flowinfer.stages.spec_verify import sources, stage
from flowinfer.stages.spec_verify.drafts import Choose, Drafter, Guesses, Ran

WAYS = {"none": "none", "looked up, ahead": "ngram", "sent, captured": "suffix", "sent, eager": "suffix"}


class Worthless:
    """Drafts the same token over and over."""

    needs_features: tuple[int, ...] = ()
    needs_host = calibrated = True

    def __init__(self, block: int) -> None:
        self.block = block

    def join(self, slot: int) -> None:
        """Knows nothing."""

    def leave(self, slot: int) -> None:
        """Knows nothing."""

    def observe(self, ran: Ran) -> None:
        """Learns nothing."""

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose) -> Guesses:
        """Of every sequence."""
        return Guesses(np.ones(slots.size, np.bool_), np.full((slots.size, self.block), 7, np.int32))


def main() -> None:
    """The table, and JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="qwen3-8b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    judge = Overlap.judge

    def make_drafter(config: stage.SpecVerify.Config, batch: Batch) -> Drafter | None:
        return Worthless(config.tokens) if config.draft == "suffix" else sources.make_drafter(config, batch)

    setattr(stage, "make_drafter", make_drafter)  # noqa: B010
    longest = args.context + (args.steps + 20) * (args.drafts + 1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_random(args.config, Path(folder), positions=longest + 64)
        blocks = max(batches) * (-(-longest // 64) + 2)
        service = EngineService(
            folder, device=args.device, dtype=args.dtype, num_blocks=blocks, max_batch=max(batches),
            max_tokens=longest + 64, chunk=32_768,
        )  # fmt: skip
        verify: Any = service.group.by_name["verify"].stage
        for way, draft in WAYS.items():
            config = verify.Config(draft=draft, tokens=args.drafts, schedule="fixed")
            verify._draft_by(config, make_drafter(config, verify.batch))
            setattr(Overlap, "judge", judge if way != "sent, eager" else lambda *_: None)  # noqa: B010
            for batch in batches:
                rows.append({"way": way, "batch": batch, **measured(service, batch, args)})
                print(
                    "{way:18} batch {batch:4} {ms:8.2f} ms  host {host_ms:6.3f}  tokens {tokens:.2f}".format(**rows[-1])
                )
        service.close()
    if args.json:
        name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "cpu"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = {"device": name, "torch": torch.__version__, "date": now, "config": args.config}
        found = {**about, "drafts": args.drafts, "context": args.context, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(service: EngineService, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """ms of a step that ran all sequences, the host's own part of it, and tokens that it gave each."""
    ahead = service.decode.overlap is not None and service.decode.overlap.plan.ngram is not None
    random = np.random.default_rng(batch)
    prompts = [random.integers(3, 1000, args.context).astype(np.int32) for _ in range(batch)]
    arrivals = service.answer(prompts, (args.steps + 16) * (1 + args.drafts * ahead))
    full = [arrival for arrival in arrivals if arrival.num_sequences == batch][3 : args.steps + 4]
    steps = len(full) - 1
    seconds = (full[-1].at - full[0].at) / steps
    waited = (full[-1].waited_s - full[0].waited_s) / steps
    tokens = sum(arrival.num_tokens for arrival in full[1:]) / steps / batch
    return {"ms": seconds * 1e3, "host_ms": (seconds - waited) * 1e3, "tokens": tokens}


if __name__ == "__main__":
    main()
