"""Reads weights to train on or with: what `run` wrote, or a folder that `export` made of it.

Names and shapes are those of TrainableV4.checkpoint; what is stored in FP8 comes back in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.quant import dequantize
from flowinfer.errors import ModelError


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json without its quantization, and the tensors; router tables int64. Raises ModelError without any."""
    files = sorted(folder.glob("weights-*.safetensors")) or sorted(folder.glob("model*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} holds no config.json with weights-*.safetensors or model.safetensors.",
            help="Give the folder that flowinfer.train.run or flowinfer.train.export wrote.",
        )
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    stored: dict[str, Tensor] = {}
    for file in files:
        stored |= load_file(file)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(".scale") and ".experts." in name}
    found = {}
    for name, tensor in stored.items():
        scale = scales.pop(name.removesuffix("weight") + "scale", None)
        if scale is not None:
            found[name] = dequantize(tensor, scale)
        else:
            found[name] = tensor.long() if name.endswith("tid2eid") else tensor.float()
    return config, found


def check_tokenizer(data: Path, folder: Path) -> None:
    """Raises ModelError where the data's ids are of another vocabulary than the weights'. A folder may have none."""
    theirs, ours = folder / "tokenizer.json", data / "tokenizer.json"
    if not theirs.is_file() or not ours.is_file():
        return
    if Tokenizer.from_file(str(theirs)).get_vocab() != Tokenizer.from_file(str(ours)).get_vocab():
        raise ModelError(
            f"the ids of {data} are of another vocabulary than {theirs}.",
            help=f"Prepare the data with --keep-tokenizer {theirs}.",
        )
