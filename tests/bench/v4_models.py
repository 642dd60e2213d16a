"""Checkpoints of DeepSeek-V4 with random numbers, under the names of the original release; every tensor shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.config import V4Config, parse_v4


def write_v4(folder: Path, sizes: dict[str, Any], *, spread: float = 0.2, dtype: torch.dtype = torch.float32) -> Path:
    """Makes `folder` a model of these fields of config.json. spread: deviation of the weights."""
    raw = {
        "architectures": ["DeepseekV4ForCausalLM"], "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 2.0, "routed_scaling_factor": 1.5,
        "max_position_embeddings": 4096, "torch_dtype": str(dtype).removeprefix("torch."),
    } | sizes  # fmt: skip
    made = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def add(name: str, *shape: int, mean: float = 0.0, kind: torch.dtype = dtype) -> None:
        tensors[name] = (torch.randn(shape, generator=made) * spread + mean).to(kind)

    config = parse_v4(raw, eos=None)
    hidden, wide = config.hidden_size, config.streams * config.hidden_size
    add("embed.weight", config.vocab_size, hidden)
    add("head.weight", config.vocab_size, hidden)
    add("norm.weight", hidden, mean=1.0)
    for part, shape in (("fn", (config.streams, wide)), ("base", (config.streams,)), ("scale", (1,))):
        add(f"hc_head_{part}", *shape, mean=float(part == "scale"), kind=torch.float32)
    for index in range(config.num_layers):
        _layer(add, tensors, config, index, made)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def _layer(add: Any, tensors: dict[str, Tensor], c: V4Config, index: int, made: torch.Generator) -> None:
    name, hidden, heads = f"layers.{index}.", c.hidden_size, c.num_heads * c.head_dim
    mixes = (2 + c.streams) * c.streams
    for site in ("attn", "ffn"):
        add(f"{name}{site}_norm.weight", hidden, mean=1.0)
        add(f"{name}hc_{site}_fn", mixes, c.streams * hidden, kind=torch.float32)
        add(f"{name}hc_{site}_base", mixes, kind=torch.float32)
        add(f"{name}hc_{site}_scale", 3, mean=1.0, kind=torch.float32)
    attention = f"{name}attn."
    add(f"{attention}wq_a.weight", c.q_rank, hidden)
    add(f"{attention}q_norm.weight", c.q_rank, mean=1.0)
    add(f"{attention}wq_b.weight", heads, c.q_rank)
    add(f"{attention}wkv.weight", c.head_dim, hidden)
    add(f"{attention}kv_norm.weight", c.head_dim, mean=1.0)
    add(f"{attention}attn_sink", c.num_heads, kind=torch.float32)
    add(f"{attention}wo_a.weight", c.o_groups * c.o_rank, heads // c.o_groups)
    add(f"{attention}wo_b.weight", hidden, c.o_groups * c.o_rank)
    pools = [("compressor.", c.head_dim)] if c.rates[index] else []
    if index in c.sparse_layers:
        pools.append(("indexer.compressor.", c.index_dim))
        add(f"{attention}indexer.wq_b.weight", c.index_heads * c.index_dim, c.q_rank)
        add(f"{attention}indexer.weights_proj.weight", c.index_heads, hidden)
    for pool, size in pools:
        channels = size * (2 if index in c.sparse_layers else 1)
        add(f"{attention}{pool}wkv.weight", channels, hidden)
        add(f"{attention}{pool}wgate.weight", channels, hidden)
        add(f"{attention}{pool}ape", c.rates[index], channels, kind=torch.float32)
        add(f"{attention}{pool}norm.weight", size, mean=1.0)
    ffn = f"{name}ffn."
    add(f"{ffn}gate.weight", c.num_experts, hidden)
    if index in c.hash_layers:
        chosen = [torch.randperm(c.num_experts, generator=made)[: c.experts_per_token] for _ in range(c.vocab_size)]
        tensors[f"{ffn}gate.tid2eid"] = torch.stack(chosen)
    else:
        add(f"{ffn}gate.bias", c.num_experts, kind=torch.float32)
    for expert in (*(f"experts.{i}." for i in range(c.num_experts)), "shared_experts."):
        for part, shape in (("w1", (c.expert_size, hidden)), ("w3", (c.expert_size, hidden))):
            add(f"{ffn}{expert}{part}.weight", *shape)
        add(f"{ffn}{expert}w2.weight", hidden, c.expert_size)
