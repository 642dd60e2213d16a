"""Model cards of draft heads, from the report of their training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowinfer.engine.draft.head import HeadConfig


def head(config: HeadConfig, report: dict[str, Any], size: int, own: Sequence[dict[str, Any]] = ()) -> str:
    """README.md of a head's folder; size in bytes. own: what bench_speculation measured in the model's own text."""
    run, calibration = report["run"], report["calibration"]
    layers = ", ".join(str(layer) for layer in config.feature_layers)
    before, after = (", ".join(f"{e:.3f}" for e in calibration[f"error_{when}"]) for when in ("before", "after"))
    heats = ", ".join(f"{heat:.2f}" for heat in calibration["temperatures"])
    last = report["log"][-1] if report["log"] else {"step": 0, "anchors": 0}
    sampled = "The text is chats that SmolLM2-135M-Instruct (Apache-2.0) wrote, those of flowinfer-mini's card"
    text = f"{sampled},\nand templates of this project." if config.target == "flowinfer-mini" else f"{sampled}."
    shape = f"{config.num_layers}, {config.num_heads}, {config.num_kv_heads}, {config.head_dim}"
    return f"""---
license: apache-2.0
language: en
---

# Draft head for {config.target}

It proposes {config.block} tokens a pass for speculative decoding, with a confidence for each, from the residual stream
of {config.target} after layers {layers} (from 0). It is of no use with any other model, and it changes no
output: what it proposes is verified. Design: `flowinfer/engine/draft/head.py`, after DSpark (arXiv 2607.05147).

| | |
|---|---|
| layers, heads, key heads, head size | {shape} |
| context it sees | {config.window} positions |
| Markov bias | rank {config.rank} |
| file | {size / 1e6:.2f} MB, bfloat16; embedding and output matrix are the target's |

## Training

`python -m flowinfer.train.heads`, seed {run["seed"]}: {report["chats"]:,} chats, {last["anchors"]:,} anchors,
{last["step"]:,} steps, {run["seconds"]:g} s on one {run["device"]} with torch {report["torch"]}; the target is frozen.
{text} The head is under Apache-2.0.

## Acceptance on held-out chats

Tokens accepted of {config.block}, the bonus token not counted, and the share accepted at each position of those that
are reached. Measured by running the target over the drafts, at anchors drawn from {report["held"]:,} held-out chats,
with context from the answer's start on; the text before the anchor is the chat's, not the target's own.

{table(report["acceptance"])}

## Confidence

Expected calibration error of the product of confidences up to each position, at temperature 1; fitted on one half of
{calibration["anchors"]:,} anchors and measured on the other:

| | by position |
|---|---|
| before | {before} |
| after | {after} |
| temperatures | {heats} |
{own_text(own)}"""


def own_text(benches: Sequence[dict[str, Any]]) -> str:
    """A section on drafts in the text that the model writes itself, by prompts; empty where nothing was measured."""
    if not benches:
        return ""
    first = benches[0]
    rows = [row for bench in benches for row in bench["acceptance"] if row["drafter"] == "head"]
    lines = [
        "| prompts | temperature | accepted | by position | error of confidence | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        held = row["held"][: len(row["error"])]
        reached = ", ".join(f"{a / b:.2f}" if b else "none" for a, b in zip(held, [1.0, *held], strict=False))
        error, heat = ", ".join(f"{each:.2f}" for each in row["error"]), f"{row['temperature']:g}"
        kind, accepted = row["kind"], row["accepted"]
        lines.append(f"| {kind} | {heat} | {accepted:.2f} | {reached} | {error} | {row['num_tokens']:,} |")
    longest = first["settings"]["answer"]
    return f"""
## In the text that the model writes itself

The same through the engine (`python tests/bench/bench_speculation.py --only acceptance`): {first["model"]} in
{first["dtype"]} on a CPU ({first["machine"].split(",")[0]}), answers of at most {longest} tokens, every draft verified.
Kinds that begin with `own` are prompts of this project's templates, from another seed than training's. The error is
that of the product of confidences up to each position, as the schedule believes them after its own calibration; over
few tokens it is mostly chance.

{chr(10).join(lines)}
"""


def table(acceptance: dict[str, Any]) -> str:
    """Markdown rows by sampling and kind of prompt."""
    rows = ["| sampling | prompts | accepted | by position | anchors |", "|---|---|---|---|---|"]
    for sampling, kinds in acceptance.items():
        for kind, found in kinds.items():
            places = ", ".join(f"{share:.2f}" for share in found["by_position"])
            rows.append(f"| {sampling} | {kind} | {found['accepted']:.2f} | {places} | {found['anchors']:,} |")
    return "\n".join(rows)
