"""`python -m flowinfer.bench`: what `flowinfer bench engine` runs, for machines that have the engine's needs only."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flowinfer.errors import FlowInferError


def main(arguments: list[str] | None = None) -> None:
    """Reads the settings, measures, prints the table, writes JSON. Exits with 1 and one line where that can't be."""
    parser = argparse.ArgumentParser(prog="python -m flowinfer.bench", description="Measure the engine by itself.")
    parser.add_argument("--config", default="smollm2-135m", help="named shape, model, folder or config.json")
    parser.add_argument("--random-weights", action="store_true", help="make the weights up")
    parser.add_argument("--batch", default="", help="decode batches, as in 1,8,32; 0 for none")
    parser.add_argument("--context", type=int, help="tokens before the first step; default 1024, 512 at batch 512")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--prefill", default="", help="PROMPTSxTOKENS, as in 8x8192; 0 for none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="checkpoint", help="as stages have it: checkpoint, fp8, int8, int4")
    parser.add_argument("--kv-dtype", default="auto", help="of keys and values: auto or fp8")
    parser.add_argument("--profile", default="", help="batches whose kernels are listed, as in 1,32")
    parser.add_argument("--batch-invariant", action="store_true", help="in the mode in which a batch changes nothing")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    try:
        measure(**vars(parser.parse_args(arguments)))
    except FlowInferError as error:
        sys.exit(f"error: {error}")


def measure(*, batch: str, prefill: str, profile: str, json: Path | None, **settings: object) -> None:
    """As main, with the settings as values. Raises FlowInferError for those that can't be read."""
    from flowinfer.bench import bars
    from flowinfer.bench.engine import Settings, run, table, to_json

    batches = _numbers("--batch", batch) if batch else bars.BATCHES
    prompts = _prompts(prefill) if prefill else bars.PREFILL
    listed = _numbers("--profile", profile)
    report = run(Settings(batches=batches, prefill=prompts, profile=listed, **settings))  # type: ignore[arg-type]
    print("\n" + table(report))
    if json:
        json.write_text(to_json(report), encoding="utf-8")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise FlowInferError(f"{option} {text!r} isn't a list of whole numbers.", help="As in 1,8,32.")
    return tuple(number for number in map(int, parts) if number)


def _prompts(text: str) -> tuple[int, int] | None:
    if text == "0":
        return None
    num, _, tokens = text.partition("x")
    if not (num.isdigit() and tokens.isdigit() and int(num) and int(tokens) > 1):
        raise FlowInferError(f"--prefill {text!r} isn't a number of prompts and tokens.", help="As in 8x8192; 0: none.")
    return int(num), int(tokens)


if __name__ == "__main__":
    main()
