"""What a draft head would have got accepted on held-out text, and the temperatures that make its confidences honest.

For each anchor the head drafts a block, and the target runs over the text with that block in place of what followed: so
acceptance is that of real drafts, not of the text's own tokens. Nothing counts after an end of text.
Dimensions: n anchors, B block, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.draft.head import DraftHead
from flowinfer.train.anchors import anchors_of, block_hidden
from flowinfer.train.targets import Chats, Target

GRID = np.logspace(-1, 1, 41)
BINS = 15
KINDS = {0: "chat", 1: "story", 3: "explain", 4: "form"}
TEMPERATURES = (1.0, 0.7, 0.0)
ROWS = 128  # rows that the target runs over at once

Floats = np.ndarray


@torch.no_grad()
def simulate(
    head: DraftHead, target: Target, chats: Chats, *, each: int, temperature: float, device: str
) -> dict[str, Floats]:
    """accepted, overlap (1 - TV) and confidence logits [n, B], counts [n, B] what lies before an end, kinds [n].

    accepted is the probability that token k is, given that those before it are; temperature 0: it's the best, or not.
    """
    tokens, lengths, prompts = chats.rows(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        _, features = target.hidden(tokens)
        rows, at, start = anchors_of(lengths, prompts, each, head.window, from_answer=1.0)
        h = block_hidden(head, tokens, features, rows, at, start)
        drafts, logits, confidences = _draft(head, h, tokens[rows, at], temperature)
    found: list[list[Tensor]] = [[], []]
    steps = torch.arange(head.block, device=device)
    for part in torch.arange(len(at), device=device).split(ROWS):
        copied = tokens[rows[part]]
        places = at[part].unsqueeze(1) + 1 + steps
        kept = places < copied.shape[1]
        copied.scatter_(1, places.clamp(max=copied.shape[1] - 1), torch.where(kept, drafts[part], 0))
        hidden, _ = target.hidden(copied)
        states = hidden[
            torch.arange(len(part), device=device).unsqueeze(1), (places - 1).clamp(max=copied.shape[1] - 1)
        ]
        wanted = F.linear(states, target.lm_head).float()
        accepted, overlap = _judge(logits[part].float(), wanted, drafts[part], temperature)
        found[0].append(accepted)
        found[1].append(overlap)
    ended = (drafts == target.eos).int()
    counts = (ended.cumsum(1) - ended == 0) & (at.unsqueeze(1) + 1 + steps < tokens.shape[1])
    values = {"accepted": torch.cat(found[0]), "overlap": torch.cat(found[1]), "confidence": confidences.float()}
    arrays = {name: value.cpu().numpy().astype(np.float64) for name, value in values.items()}
    return {**arrays, "counts": counts.cpu().numpy(), "kinds": chats.kinds[rows.cpu().numpy()]}


def _draft(head: DraftHead, h: Tensor, anchors: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    base = head.logits(h)
    previous, row = anchors, h.new_zeros(h.shape[0], head.config.rank)
    drafts, logits, confidences = [], [], []
    for k in range(head.block):
        row, confidence = head.markov(h[:, k], previous, row)
        row_logits = base[:, k] + head.markov.bias(row).float()
        if temperature:
            previous = torch.multinomial((row_logits / temperature).softmax(-1), 1).squeeze(1)
        else:
            previous = row_logits.argmax(-1)
        drafts.append(previous)
        logits.append(row_logits)
        confidences.append(confidence)
    return torch.stack(drafts, 1), torch.stack(logits, 1), torch.stack(confidences, 1)


def _judge(draft: Tensor, wanted: Tensor, drafts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    if not temperature:
        same = (wanted.argmax(-1) == drafts).float()
        return same, same
    p_draft, p_target = (draft / temperature).softmax(-1), (wanted / temperature).softmax(-1)
    mine, theirs = (p.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for p in (p_draft, p_target))
    return (theirs / mine.clamp(min=1e-20)).clamp(max=1.0), torch.minimum(p_draft, p_target).sum(-1)


def summary(found: dict[str, Floats]) -> dict[str, Any]:
    """Mean accepted length without the bonus token, acceptance by position given that it is reached, anchors."""
    accepted = found["accepted"] * found["counts"]
    through = np.cumprod(accepted, 1)
    reached = np.concatenate((np.ones((len(through), 1)), through[:, :-1]), 1) * found["counts"]
    by_position = (reached * found["overlap"]).sum(0) / np.maximum(reached.sum(0), 1e-9)
    return {
        "accepted": round(float(through.sum(1).mean()), 3),
        "by_position": np.round(by_position, 3).tolist(),
        "anchors": len(through),
    }


def calibration_error(predicted: Floats, outcome: Floats) -> float:
    """Expected calibration error of probabilities [n] in BINS equal bins."""
    places = np.minimum((predicted * BINS).astype(int), BINS - 1)
    sums = [np.bincount(places, weights=values, minlength=BINS) for values in (predicted, outcome)]
    return float(np.abs(sums[0] - sums[1]).sum() / len(predicted))


def calibrate(logits: Floats, accepted: Floats) -> list[float]:
    """Temperatures by position (STS, DSpark 3.2): each minimises the error of the product up to it."""
    chosen: list[float] = []
    before, outcome = np.ones(len(logits)), np.ones(len(logits))
    for k in range(logits.shape[1]):
        outcome = outcome * accepted[:, k]
        errors = [calibration_error(before * _sigmoid(logits[:, k] / heat), outcome) for heat in GRID]
        chosen.append(float(GRID[int(np.argmin(errors))]))
        before = before * _sigmoid(logits[:, k] / chosen[-1])
    return chosen


def cumulative_errors(logits: Floats, accepted: Floats, temperatures: list[float]) -> list[float]:
    """Calibration error of the product of confidences up to each position."""
    predicted = np.cumprod(_sigmoid(logits / np.array(temperatures)), 1)
    outcome = np.cumprod(accepted, 1)
    return [round(calibration_error(predicted[:, k], outcome[:, k]), 4) for k in range(logits.shape[1])]


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))


def report(
    head: DraftHead, target: Target, held: Chats, *, anchors: int, device: str, seed: int, each: int = 8
) -> dict[str, Any]:
    """Acceptance by temperature and kind; calibration at temperature 1, fitted on half and measured on the other."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    chosen = held.pick(rng.permutation(len(held))[: max(1, anchors // each)])
    tables: dict[str, Any] = {}
    plain: dict[str, Floats] = {}
    for temperature in TEMPERATURES:
        parts = [
            simulate(head, target, chosen.pick(part), each=each, temperature=temperature, device=device)
            for part in np.array_split(np.arange(len(chosen)), -(-len(chosen) // 64))
        ]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        plain = plain or found
        table = {"all": summary(found)}
        for kind, name in KINDS.items():
            mine = found["kinds"] == kind
            if mine.any():
                table[name] = summary({key: value[mine] for key, value in found.items()})
        tables["greedy" if not temperature else f"temperature {temperature:g}"] = table
    whole = plain["counts"].all(1)
    logits, accepted = plain["confidence"][whole], plain["accepted"][whole]
    half = len(logits) // 2
    fitted = calibrate(logits[:half], accepted[:half])
    plain_heat = [1.0] * logits.shape[1]
    return {
        "acceptance": tables,
        "calibration": {
            "temperatures": [round(heat, 4) for heat in fitted],
            "anchors": len(logits),
            "error_before": cumulative_errors(logits[half:], accepted[half:], plain_heat),
            "error_after": cumulative_errors(logits[half:], accepted[half:], fitted),
        },
    }
