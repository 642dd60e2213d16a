"""`python -m flowinfer.bench`: what `flowinfer bench engine` runs, for machines that have the engine's needs only."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    """Reads the settings, measures, prints the table, writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m flowinfer.bench", description="Measure the engine by itself.")
    parser.add_argument("--config", default="smollm2-135m", help="named shape, model, folder or config.json")
    parser.add_argument("--random-weights", action="store_true", help="make the weights up")
    parser.add_argument("--batch", default="", help="decode batches, as in 1,8,32; 0 for none")
    parser.add_argument("--context", type=int, help="tokens before the first step; default 1024, 512 at batch 512")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--prefill", default="", help="PROMPTSxTOKENS, as in 8x8192; 0 for none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--profile", default="", help="batches whose kernels are listed, as in 1,32")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    measure(**vars(parser.parse_args(arguments)))


def measure(*, batch: str, prefill: str, profile: str, json: Path | None, **settings: object) -> None:
    """As main, with the settings as values."""
    from flowinfer.bench import bars
    from flowinfer.bench.engine import Settings, run, table, to_json

    batches = bars.BATCHES if not batch else tuple(int(b) for b in batch.split(",") if int(b))
    prompts = bars.PREFILL
    if prefill:
        num, _, tokens = prefill.partition("x")
        prompts = (int(num), int(tokens)) if tokens else None  # type: ignore[assignment]
    listed = tuple(int(b) for b in profile.split(",") if b)
    report = run(Settings(batches=batches, prefill=prompts, profile=listed, **settings))  # type: ignore[arg-type]
    print("\n" + table(report))
    if json:
        json.write_text(to_json(report), encoding="utf-8")


if __name__ == "__main__":
    main()
