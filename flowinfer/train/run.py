"""Trains flowinfer-mini on one GPU: packed sequences of 4,096 tokens, AdamW, routers balanced by their bias alone.

Half of the steps let a token see its own chat only, the other half whatever lies before it in the sequence: the first
is what serving sees most, the second teaches the compressed entries of long contexts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from flowinfer.engine import hub
from flowinfer.engine.models.deepseek_v4.config import V4Config, parse_v4
from flowinfer.train import checkpoint
from flowinfer.train.model import TrainableV4

BOS_ID = 0
LR, LR_ON = 2e-3, 5e-4  # peak rates: from random weights, and from trained ones
HELD_ROWS = 8  # sequences of held-out text that are measured
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
MINI: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 8192,
    "hidden_size": 256,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "q_lora_rank": 128,
    "num_experts_per_tok": 2,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 128,
    "layer_types": [SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY, SPARSE, HEAVY],
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 6,
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "sliding_window": 128,
    "qk_rope_head_dim": 32,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 4096,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}


def batch(tokens: np.ndarray, starts: np.ndarray, size: int, count: int, rng: np.random.Generator) -> Tensor:
    """int64 [count, size + 1]: sequences that begin with a chat and run on through those after it."""
    picked = rng.choice(starts[starts < len(tokens) - size - 1], count)
    return torch.from_numpy(np.stack([tokens[at : at + size + 1] for at in picked]).astype(np.int64))


def loss_of(model: TrainableV4, rows: Tensor, *, apart: bool) -> tuple[Tensor, list[Tensor]]:
    """Mean cross-entropy in nats of the next tokens, and in training the indexers' losses."""
    tokens = rows[:, :-1]
    documents = (tokens == BOS_ID).cumsum(1) if apart else torch.zeros_like(tokens)
    hidden, _, losses = model.hidden(tokens, documents)
    return head_loss(hidden, model.embed.weight, rows[:, 1:]), losses


def head_loss(hidden: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of hidden [B, S, H] through the tied head."""
    return F.cross_entropy(F.linear(hidden, embed).flatten(0, 1).float(), targets.flatten())


def balance(model: TrainableV4, rate: float) -> list[float]:
    """Nudges the bias of over- and underused experts; returns busiest-to-mean load by layer."""
    peaks = []
    for block in model.blocks:
        gate = block.ffn.gate
        mean = gate.load.mean()
        peaks.append(float(gate.load.max() / mean))
        if not gate.hashed:
            gate.bias += rate * torch.sign(mean - gate.load)
        gate.load.zero_()
    return peaks


def optimizer(model: TrainableV4, lr: float) -> torch.optim.AdamW:
    """Matrices decay; norms, biases, sinks and the mixing of streams don't."""
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and "hc_" not in n and not n.endswith("ape")]
    chosen = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=model.embed.weight.is_cuda)


def schedule(done: float, warm: float = 0.04, floor: float = 0.02) -> float:
    """Share of the learning rate at a share of the run: a ramp, then a cosine."""
    if done < warm:
        return done / warm + 1e-3
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warm) / (1 - warm))))


@torch.no_grad()
def evaluate(model: TrainableV4, held: np.ndarray, batch_size: int, size: int, context: Any, device: str) -> float:
    """Held-out loss, each chat seeing itself alone."""
    model.eval()
    count = min(batch_size, (len(held) - 1) // size)
    rows = torch.from_numpy(np.stack([held[i * size : (i + 1) * size + 1] for i in range(count)]).astype(np.int64))
    with context(), torch.compiler.set_stance("force_eager"):  # compiling for this too would cost more than it saves
        loss = float(loss_of(model, rows.to(device), apart=True)[0])
    model.train()
    return loss


def compiled(model: TrainableV4) -> None:
    """Has every block compiled at its first step: three graphs, one a kind of layer."""
    torch._dynamo.config.cache_size_limit = 32
    for block in model.blocks:
        block.compile(dynamic=False)


def compiles(model: TrainableV4, rows: Tensor, context: Any) -> bool:
    """Whether a compiled step runs here; where it doesn't, the model is eager again."""
    compiled(model)
    try:
        with context():
            loss, losses = loss_of(model, rows, apart=True)
        torch.autograd.backward(loss + sum(losses))
        return True
    except Exception as error:  # whatever a compiler may raise: the run goes on without it, and says so
        print(f"not compiled: {type(error).__name__}: {str(error)[:500]}", flush=True)
        for block in model.blocks:
            block._compiled_call_impl = None
        return False
    finally:
        model.zero_grad(set_to_none=True)
        for block in model.blocks:
            block.ffn.gate.load.zero_()


def train(
    args: argparse.Namespace, config: V4Config, weights: dict[str, Tensor] | None = None
) -> tuple[TrainableV4, list[dict[str, float]]]:
    """Runs until steps are done or seconds are over; the schedule follows whichever is nearer its end.

    weights: to begin with, of a checkpoint; random ones otherwise.
    """
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    data = np.load(args.data / "train.npz")
    tokens, held = data["tokens"], np.load(args.data / "held_out.npz")["tokens"]
    starts = data["starts"].astype(np.int64)
    model = TrainableV4(config)
    if weights is not None:
        model.load_checkpoint(weights)
    model = model.to(device).train()
    tuner = optimizer(model, args.lr)

    def context() -> torch.autocast:
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    if args.compile:
        args.compile = compiles(model, batch(tokens, starts, args.size, args.batch, rng).to(device), context)
    began, log, seen = time.perf_counter(), [], 0
    seconds = max(1.0, args.seconds - (began - started))
    for step in range(args.steps):
        elapsed = time.perf_counter() - began
        done = max(step / args.steps, elapsed / seconds)
        if done >= 1:
            break
        for group in tuner.param_groups:
            group["lr"] = args.lr * schedule(done)
        rows = batch(tokens, starts, args.size, args.batch, rng).to(device, non_blocking=True)
        with context():
            loss, losses = loss_of(model, rows, apart=step % 2 == 0)
        index = torch.stack(losses).mean()
        torch.autograd.backward(loss + 0.1 * index)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tuner.step()
        tuner.zero_grad(set_to_none=True)
        peaks = balance(model, 1e-3 * (1 - done)) if step % 4 == 3 or step == 0 else []
        seen += rows[:, 1:].numel()
        if step % args.every == 0:
            entry = {
                "step": step,
                "tokens": seen,
                "seconds": round(elapsed, 1),
                "loss": round(loss.item(), 4),
                "index": round(index.item(), 4),
                "held_out": round(evaluate(model, held, HELD_ROWS, args.size, context, device), 4),
                "peak": round(max(peaks), 2) if peaks else 0.0,
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
    last = {"step": step + 1, "tokens": seen, "seconds": round(time.perf_counter() - began, 1)}
    last["compile_seconds"] = round(began - started, 1)
    for path in sorted(args.data.glob("held_*.npz")):
        part = np.load(path)["tokens"]
        if len(part) > args.size:
            last[path.stem] = round(evaluate(model, part, HELD_ROWS, args.size, context, device), 4)
    log.append(last)
    print(json.dumps(last), flush=True)
    return model, log


def main() -> None:
    """Writes config.json, log.json and shards of float16 weights under 15 MB each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--size", type=int, default=4096, help="tokens a sequence")
    parser.add_argument(
        "--init", help="weights to go on from: flowinfer-mini, or a folder that `run` or `export` wrote"
    )
    parser.add_argument("--lr", type=float, help=f"peak rate; {LR:g}, with --init {LR_ON:g}")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the layers; eager where that fails")
    args = parser.parse_args()
    args.lr = args.lr or (LR_ON if args.init else LR)
    config, weights = MINI, None
    if args.init:
        start = hub.resolve(args.init)
        checkpoint.check_tokenizer(args.data, start)
        config, weights = checkpoint.read(start)
    model, log = train(args, parse_v4(config, eos=None), weights)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = {**vars(args), "device": device, "torch": torch.__version__, "python": sys.version.split()[0]}
    prepared = args.data / "data.json"
    facts["prepared"] = json.loads(prepared.read_text()) if prepared.is_file() else {}
    (args.out / "log.json").write_text(json.dumps({"run": facts, "log": log}, default=str, indent=1))
    save_shards(model.checkpoint(), args.out)


def save_shards(tensors: dict[str, Tensor], folder: Path, most: int = 15_000_000) -> None:
    """bfloat16 weights, in files of at most `most` bytes; what is float32 in checkpoints is kept so."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        kept = tensor.detach().cpu()
        if kept.is_floating_point() and name.endswith("weight") and kept.dim() > 1:
            kept = kept.to(torch.bfloat16)
        if name.endswith("tid2eid"):
            kept = kept.to(torch.uint8)  # widened again by `export`
        size += kept.nbytes
        if size > most:
            shards.append({})
            size = kept.nbytes
        shards[-1][name] = kept.contiguous()
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"weights-{i}.safetensors")


if __name__ == "__main__":
    main()
