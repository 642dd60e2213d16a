"""Trains a draft head against its frozen target, measures what it would have accepted, and calibrates its confidences.

Loss (DSpark): 0.1 cross-entropy with the text + 0.9 |p_draft - p_target|_1 + cross-entropy of the confidence with
1 - |p_draft - p_target|_1 / 2, position k weighted exp(-(k - 1) / 4). Cross-entropy weighs more at the start, where the
distance has next to no gradient. Half of the anchors compare at temperature 1 and teach the confidence, the others at
0.6, so that sharper distributions are met too. An anchor sees context from the answer's start most often, since
that is where decoding starts with an empty state, else from a random place.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine import hub
from flowinfer.engine.draft.head import DraftHead, read
from flowinfer.errors import ModelError
from flowinfer.train import speculate
from flowinfer.train.anchors import anchors_of, block_hidden, following
from flowinfer.train.run import schedule
from flowinfer.train.targets import Chats, LlamaTarget, MiniTarget, Target, load_chats

SHARP = 0.6
DECAY = 4.0
LR, LR_ON = 1.5e-3, 5e-4  # peak rates: from random weights, and from a trained head
HELD_OUT = 50


def forced(head: DraftHead, h: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Bias rows [n, B, R] and the confidences' logits [n, B] after the text's own tokens, previous int [n, B]."""
    row, found, logits = h.new_zeros(h.shape[0], head.config.rank), [], []
    for k in range(head.block):
        row, logit = head.markov(h[:, k], previous[:, k], row)
        found.append(row)
        logits.append(logit)
    return torch.stack(found, 1), torch.stack(logits, 1)


def losses(
    head: DraftHead, target: Target, chats: Chats, *, each: int, text_weight: float, device: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch of chats, and its parts with 1 - TV by position at temperature 1."""
    tokens, lengths, prompts = chats.rows(device)
    hidden, features = target.hidden(tokens)
    rows, at, start = anchors_of(lengths, prompts, each, head.window)
    h = block_hidden(head, tokens, features, rows, at, start)
    ahead = following(tokens, rows, at, head.block + 1)
    biases, confidence = forced(head, h, ahead[:, :-1])
    steps = torch.arange(head.block, device=device)
    valid = at.unsqueeze(1) + steps + 1 < lengths[rows].unsqueeze(1)
    weight = valid * torch.exp(-steps / DECAY)
    weight = weight / weight.sum()
    # One product for the target's matrix and the bias: [h; row] [lm_head; W2].
    matrix = torch.cat((target.lm_head, head.markov.w2.weight.to(target.lm_head.dtype)), 1)
    draft = F.linear(torch.cat((h.to(matrix.dtype), biases.to(matrix.dtype)), -1), matrix)
    places = (at.unsqueeze(1) + steps).clamp(max=tokens.shape[1] - 1)
    wanted = F.linear(hidden[rows.unsqueeze(1), places], target.lm_head)
    plain = torch.rand(len(at), device=device) < 0.5
    heat = torch.where(plain, 1.0, SHARP)[:, None, None]
    distance = ((draft.float() / heat).softmax(-1) - (wanted.float() / heat).softmax(-1)).abs().sum(-1)
    text = F.cross_entropy(draft.flatten(0, 1).float(), ahead[:, 1:].flatten(), reduction="none").view_as(distance)
    label = (1 - 0.5 * distance).detach()
    certain = F.binary_cross_entropy_with_logits(confidence, label, reduction="none") * plain.unsqueeze(1)
    parts = {
        "text": (text * weight).sum(),
        "distance": (distance * weight).sum(),
        "confidence": (certain * weight).sum(),
    }
    total = text_weight * parts["text"] + 0.9 * parts["distance"] + 2 * parts["confidence"]
    counted = valid * plain.unsqueeze(1)
    kept = (label * counted).sum(0) / counted.sum(0).clamp(min=1)
    return total, {**{name: part.detach() for name, part in parts.items()}, "kept": kept}


def train(head: DraftHead, target: Target, chats: Chats, args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Until time is over; returns the log."""
    rng = np.random.default_rng(args.seed)
    decayed = [p for p in head.parameters() if p.dim() > 1]
    others = [p for p in head.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    tuner = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    began, log, step, anchors = time.perf_counter(), list[dict[str, Any]](), 0, 0
    while (done := max((time.perf_counter() - began) / args.seconds, step / args.steps)) < 1:
        for group in tuner.param_groups:
            group["lr"] = args.lr * schedule(done)
        # Chats of like length share a batch, so that little is padding.
        pool = rng.choice(len(chats), args.batch * 8)
        order = pool[np.argsort(chats.lengths[pool], kind="stable")]
        chosen = chats.pick(order.reshape(8, -1)[rng.integers(8)])
        text_weight = 1.0 if done < 0.25 and not args.init else 0.1
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, parts = losses(head, target, chosen, each=args.each, text_weight=text_weight, device=device)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        tuner.step()
        tuner.zero_grad(set_to_none=True)
        step, anchors = step + 1, anchors + args.batch * args.each
        if step % args.every == 1:
            shown = {name: np.round(value.float().cpu().numpy(), 4).tolist() for name, value in parts.items()}
            log.append({"step": step, "anchors": anchors, "seconds": round(time.perf_counter() - began, 1), **shown})
            print(json.dumps(log[-1]), flush=True)
    return log


def begun(target: Target, path: Path | None) -> DraftHead:
    """A head for the target: of random weights, or with those of a file. Raises ModelError where its sizes differ."""
    head = DraftHead(target.config)
    head.attach(target.embed, target.lm_head)
    if path is not None:
        config, tensors = read(path)
        if msgspec.structs.replace(config, temperatures=(), digest="") != target.config:
            raise ModelError(f"{path}: a head of other sizes: {config}, not {target.config}.", help="Leave --init out.")
        head.load_state_dict(tensors)
    return head


def main() -> None:
    """Writes draft.safetensors with calibrated temperatures, and report.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=["mini", "smollm2"], required=True)
    parser.add_argument("--model", required=True, help="name or folder; mini: what `run` wrote will do too")
    parser.add_argument("--init", type=Path, help="a head's file to go on from")
    parser.add_argument("--chats", type=Path, nargs="+", required=True, help="npz files in the target's ids")
    parser.add_argument("--held", type=Path, nargs="*", default=[], help="held-out npz files; none: one chat of 50")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=64, help="chats a step")
    parser.add_argument("--each", type=int, default=48, help="anchors a chat")
    parser.add_argument("--size", type=int, default=384, help="tokens of a chat that are used")
    parser.add_argument("--lr", type=float, help=f"peak rate; {LR:g}, with --init {LR_ON:g}")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--measure", type=int, default=3072, help="held-out anchors a temperature")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.lr = args.lr or (LR_ON if args.init else LR)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    folder = hub.resolve(args.model)
    target: Target = (
        MiniTarget(folder, device, dtype)
        if args.target == "mini"
        else LlamaTarget(folder, device, dtype, "smollm2-135m")
    )
    chats = load_chats(args.chats, size=args.size, least=8)
    if args.held:
        held = load_chats(args.held, size=args.size, least=8)
    else:
        is_held = np.arange(len(chats)) % HELD_OUT == 0
        held, chats = chats.pick(is_held), chats.pick(~is_held)
    head = begun(target, args.init).to(device)
    log = train(head, target, chats, args, device)
    head.requires_grad_(False).eval()
    report = speculate.report(head, target, held, anchors=args.measure, device=device, seed=args.seed)
    calibrated = tuple(report["calibration"]["temperatures"])
    head.config = msgspec.structs.replace(head.config, temperatures=calibrated)
    args.out.mkdir(parents=True, exist_ok=True)
    head.save(args.out / "draft.safetensors")
    facts = {**vars(args), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    written = {"run": facts, "torch": torch.__version__, "chats": len(chats), "held": len(held), **report, "log": log}
    (args.out / "report.json").write_text(json.dumps(written, default=str, indent=1))
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
