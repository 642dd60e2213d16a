"""A dense model of the Llama family for training runs: whole sequences with features, and sampling with a fixed cache.

Serving has its own (engine.models.decoder); here nothing is paged, so that thousands of answers are sampled by one CUDA
graph a step, and a draft head's target runs over padded rows at full speed.
Dimensions: B rows, S positions, L layers, N heads, K key heads, D head size, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """Weights of one block, each [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """Weights of a checkpoint folder on one device."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tensors = {name: t.to(device, dtype) for name, t in load_file(folder / "model.safetensors").items()}
        self.num_layers, self.hidden_size = raw["num_hidden_layers"], raw["hidden_size"]
        self.num_heads, self.num_kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.head_dim = raw.get("head_dim") or self.hidden_size // self.num_heads
        self.eps, self.eos = raw["rms_norm_eps"], raw["eos_token_id"]
        self.embed = tensors["model.embed_tokens.weight"]
        self.lm_head = tensors.get("lm_head.weight", self.embed)
        self.norm = tensors["model.norm.weight"]
        self.vocab_size = self.embed.shape[0]
        self.layers = [self._layer(tensors, f"model.layers.{i}.") for i in range(self.num_layers)]
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        self._inverse = 1.0 / raw["rope_theta"] ** exponents

    @staticmethod
    def _layer(tensors: dict[str, Tensor], name: str) -> Layer:
        qkv = torch.cat([tensors[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        return Layer(
            tensors[f"{name}input_layernorm.weight"], qkv, tensors[f"{name}self_attn.o_proj.weight"],
            tensors[f"{name}post_attention_layernorm.weight"], gate_up, tensors[f"{name}mlp.down_proj.weight"],
        )  # fmt: skip

    def forward(self, tokens: Tensor, after: tuple[int, ...] = (), cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Normed hidden states [B, S, H] of rows int [B, S], padded at the right, and features [B, S, len(after) * H].

        Features are the residual stream after the layers named. A cache takes keys and values of its first rows.
        """
        x = F.embedding(tokens, self.embed)
        rotation = self._rotation(torch.arange(tokens.shape[1], device=x.device), x.dtype)
        kept = []
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x, rotation)
            if cache is not None:
                cache.keys[index][cache.rows, :, : k.shape[2]] = k
                cache.values[index][cache.rows, :, : v.shape[2]] = v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._rest(layer, x, attended.transpose(1, 2).flatten(2))
            if index in after:
                kept.append(x)
        features = torch.cat(kept, -1) if kept else x[..., :0]
        return F.rms_norm(x, (self.hidden_size,), self.norm, self.eps), features

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] of what follows tokens int [B] at positions int [B]; their keys and values go to the cache."""
        x = F.embedding(tokens, self.embed).unsqueeze(1)
        rotation = self._rotation(positions.unsqueeze(1), x.dtype)
        rows = torch.arange(len(tokens), device=x.device)
        at = torch.arange(cache.size, device=x.device)
        bias = torch.where(at <= positions.unsqueeze(1), 0.0, -torch.inf).to(x.dtype)[:, None, None]
        groups = self.num_heads // self.num_kv_heads
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x, rotation)
            keys, values = cache.keys[index], cache.values[index]
            keys[rows, :, positions], values[rows, :, positions] = k.squeeze(2), v.squeeze(2)
            grouped = q.view(len(tokens), self.num_kv_heads, groups, self.head_dim)  # heads of one key as its queries
            mask = bias.expand(-1, self.num_kv_heads, groups, -1)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            x = self._rest(layer, x, attended.reshape(len(tokens), 1, -1))
        return F.linear(F.rms_norm(x.squeeze(1), (self.hidden_size,), self.norm, self.eps), self.lm_head)

    def _heads(self, layer: Layer, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, N, S, D] and keys, and values [B, K, S, D]."""
        normed = F.rms_norm(x, (self.hidden_size,), layer.input_norm, self.eps)
        heads = torch.unflatten(F.linear(normed, layer.qkv), -1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return _rotate(q, *rotation), _rotate(k, *rotation), v

    def _rest(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended, layer.out)
        gate, up = F.linear(F.rms_norm(x, (self.hidden_size,), layer.post_norm, self.eps), layer.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [S, D / 2] of positions [S], or [B, 1, S, D / 2] of [B, S]."""
        angles = positions.float().unsqueeze(-1) * self._inverse
        angles = angles.unsqueeze(1) if positions.dim() == 2 else angles
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Cache:
    """Keys and values [L, B, K, size, D]. rows: which ones a forward over several sequences fills."""

    def __init__(self, model: Llama, batch: int, size: int) -> None:
        shape = (model.num_layers, batch, model.num_kv_heads, size, model.head_dim)
        self.keys, self.values = model.embed.new_zeros(shape), model.embed.new_zeros(shape)
        self.size = size
        self.rows = torch.arange(batch, device=model.embed.device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
