"""Model cards of draft heads, from the report of their training."""

from __future__ import annotations

from typing import Any

from flowinfer.engine.draft.head import HeadConfig


def head(config: HeadConfig, report: dict[str, Any], size: int) -> str:
    """README.md of a head's folder; size in bytes."""
    run, calibration = report["run"], report["calibration"]
    layers = ", ".join(str(layer) for layer in config.feature_layers)
    before, after = (", ".join(f"{e:.3f}" for e in calibration[f"error_{when}"]) for when in ("before", "after"))
    heats = ", ".join(f"{heat:.2f}" for heat in calibration["temperatures"])
    last = report["log"][-1] if report["log"] else {"step": 0, "anchors": 0}
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
The text is that of flowinfer-mini's card: chats sampled from SmolLM2-135M-Instruct (Apache-2.0), and templates of this
project. The head is under Apache-2.0.

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
"""


def table(acceptance: dict[str, Any]) -> str:
    """Markdown rows by sampling and kind of prompt."""
    rows = ["| sampling | prompts | accepted | by position | anchors |", "|---|---|---|---|---|"]
    for sampling, kinds in acceptance.items():
        for kind, found in kinds.items():
            places = ", ".join(f"{share:.2f}" for share in found["by_position"])
            rows.append(f"| {sampling} | {kind} | {found['accepted']:.2f} | {places} | {found['anchors']:,} |")
    return "\n".join(rows)
