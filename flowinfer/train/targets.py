"""Frozen targets of draft heads, over whole padded rows: flowinfer-mini as it ships, dense models of the Llama family.

Dimensions: B rows, S positions, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flowinfer.engine.draft.head import HeadConfig
from flowinfer.engine.models.deepseek_v4.config import parse_v4
from flowinfer.engine.models.deepseek_v4.quant import dequantize, quantize_fp8
from flowinfer.train import checkpoint
from flowinfer.train.llama import Llama
from flowinfer.train.model import TrainableV4
from flowinfer.train.prepare import LEFT_OUT, bounds

PAD_TO = 128


class Target(Protocol):
    """What a head is trained on. embed and lm_head [V, H]; config: the sizes of its head."""

    embed: Tensor
    lm_head: Tensor
    config: HeadConfig
    eos: int

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states before the output matrix [B, S, H] and features [B, S, F] of rows int [B, S]."""
        ...


class MiniTarget:
    """flowinfer-mini as it ships, or from the folder that `run` wrote: then rounded as `export` would."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        raw, tensors = checkpoint.read(folder)
        self.model = TrainableV4(parse_v4(raw, eos=None))
        self.model.load_checkpoint({name: rounded(name, tensor) for name, tensor in tensors.items()})
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.dtype, self.device = dtype, device
        self.embed = self.lm_head = self.model.embed.weight.to(dtype)
        self.eos = raw["eos_token_id"]
        last = raw["num_hidden_layers"] - 1
        self.config = HeadConfig(
            target="flowinfer-mini",
            hidden_size=raw["hidden_size"],
            vocab_size=raw["vocab_size"],
            feature_layers=tuple(sorted({last * 2 // 7, last * 5 // 7, last})),
            num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32, ffn_size=304, rank=32,
        )  # fmt: skip

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device, self.dtype, enabled=self.dtype is not torch.float32):
            hidden, features, _ = self.model.hidden(tokens, torch.zeros_like(tokens), self.config.feature_layers)
        return hidden.to(self.dtype), features.to(self.dtype)


class LlamaTarget:
    """A checkpoint folder of a dense model."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype, name: str) -> None:
        self.model = Llama(folder, device, dtype)
        self.embed, self.lm_head, self.eos = self.model.embed, self.model.lm_head, self.model.eos
        layers = self.model.num_layers
        self.config = HeadConfig(
            target=name,
            hidden_size=self.model.hidden_size,
            vocab_size=self.model.vocab_size,
            feature_layers=tuple(sorted({layers // 3, layers * 2 // 3, layers - 1})),
            num_layers=1, num_heads=9, num_kv_heads=3, head_dim=64, ffn_size=1472, rank=32,
        )  # fmt: skip

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.forward(tokens, self.config.feature_layers)


def rounded(name: str, tensor: Tensor) -> Tensor:
    """A weight as the exported checkpoint gives it back, in float32."""
    if ".experts." in name:
        return dequantize(*quantize_fp8(tensor.float()))
    if name.endswith("tid2eid"):
        return tensor.long()
    return tensor.float() if name.endswith("gate.bias") else tensor.to(torch.bfloat16).float()


@dataclass(frozen=True)
class Chats:
    """Chats as rows that may be cut at `size` tokens: where each begins, its length, its prompt's length, its kind."""

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def pick(self, chosen: np.ndarray) -> Chats:
        """Some of them."""
        return Chats(self.tokens, *(a[chosen] for a in (self.starts, self.lengths, self.prompts, self.kinds)))

    def rows(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Padded rows int64 [B, S], lengths [B] and prompt lengths [B]; S is whole blocks of PAD_TO."""
        size = -(-int(self.lengths.max()) // PAD_TO) * PAD_TO
        packed = np.zeros((len(self), size), np.int64)
        for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            packed[i, :length] = self.tokens[start : start + length]
        return (
            torch.from_numpy(packed).to(device),
            torch.from_numpy(self.lengths).to(device),
            torch.from_numpy(self.prompts).to(device),
        )


def load_chats(paths: list[Path], *, size: int, least: int) -> Chats:
    """Chats of npz files whose answers have at least `least` tokens within the first `size`; kind 2 is left out."""
    parts: list[list[np.ndarray]] = [[], [], [], [], []]
    offset = 0
    for path in paths:
        data = np.load(path)
        tokens = data["tokens"]
        spans = np.array(bounds(data), np.int64).reshape(-1, 2)
        ends = np.append(spans[1:, 0], len(tokens))
        lengths, prompts = np.minimum(ends - spans[:, 0], size), spans[:, 1] - spans[:, 0]
        good = (lengths - prompts >= least) & (data["kind"] != LEFT_OUT)
        found = (tokens, spans[good, 0] + offset, lengths[good], prompts[good], data["kind"][good])
        for part, values in zip(parts, found, strict=True):
            part.append(values)
        offset += len(tokens)
    return Chats(*(np.concatenate(part) for part in parts))
