"""Well-known shapes by name, and models of random weights: for measuring, where the weights themselves aren't there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowinfer.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RANDOM = "flowinfer_random_weights"  # in config.json: make the weights up
_STD = 0.02

_QWEN3 = {
    "vocab_size": 151_936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 151_645,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8_192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "eos_token_id": 2,
    },
    "qwen3-8b": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4_096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}


def write_random(name: str, folder: Path, *, positions: int = 0) -> Path:
    """Makes `folder` a model of this named shape, or of the config.json that `name` points to, with random weights.

    It takes at least `positions` tokens, if the shape itself takes fewer.
    Raises ModelError for a name that is neither.
    """
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if name in CONFIGS:
        config = CONFIGS[name]
    elif file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
    else:
        raise ModelError(
            f"no configuration {name!r}.", help=f"Give a folder, a config.json or one of: {', '.join(CONFIGS)}."
        )
    most = max(positions, config.get("max_position_embeddings", 0))
    config = config | {"max_position_embeddings": most, RANDOM: True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def wants_random(folder: Path) -> bool:
    """Whether the folder's config.json asks for made-up weights."""
    return bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get(RANDOM, False))


class RandomWeights:
    """Takes the place of engine.weights.Weights: norms of one, biases of zero, the rest normal with deviation 0.02."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        import torch

        self.dtype, self.device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
        """A new tensor of this shape, or `out` filled."""
        import torch

        made = torch.empty(shape, dtype=self.dtype, device=self.device) if out is None else out
        if name.endswith(("norm.weight", "bias")):
            return made.fill_(float(name.endswith("weight")))
        return made.normal_(0, _STD, generator=self._generator)

    def settle(self) -> None:
        """Nothing is ever under way."""

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Nothing is ever left over."""
