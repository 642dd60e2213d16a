"""What was trained to folders that ship: a checkpoint with routed experts in FP8, or a draft head; with manifests."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowinfer.engine import manifest
from flowinfer.engine.draft.head import METADATA, read
from flowinfer.engine.models.deepseek_v4.quant import quantize_fp8
from flowinfer.train import cards
from flowinfer.train.prepare import ASSISTANT, BOS, EOS, THINK, UNTHINK, USER

# Turns as in DeepSeek-V4's format; no tools and no effort levels, which this model wasn't trained on.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '" + USER + "' ~ message.content }}"
    "{% elif message.role == 'assistant' %}{{ '" + ASSISTANT + UNTHINK + "' ~ message.content ~ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}"
    "{% if thinking | default(false) %}{{ '" + THINK + "' }}{% else %}{{ '" + UNTHINK + "' }}{% endif %}{% endif %}"
)
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and dtypes of the original release; what stays float32 there (biases, mixing, norms) is bfloat16 here too.

    Only the router's bias is kept exact: it decides between experts whose scores differ little.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            weight, scale = quantize_fp8(tensor.float())
            found[name], found[name.removesuffix("weight") + "scale"] = weight, scale.to(torch.float8_e8m0fnu)
        elif name.endswith("tid2eid"):
            found[name] = tensor.to(torch.uint8)
        else:
            found[name] = tensor.contiguous() if name.endswith("gate.bias") else tensor.to(torch.bfloat16)
    return found


def export(run: Path, tokenizer: Path, out: Path, *, source: str) -> None:
    """Writes a complete Hugging Face folder; a README.md that is there already stays and is checksummed."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(run.glob("weights-*.safetensors")):
        tensors |= load_file(shard)
    save_file(packed(tensors), out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((run / "config.json").read_text()) | {"quantization_config": QUANTIZED}
    _write(out / "config.json", config)
    _write(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copy(tokenizer, out / "tokenizer.json")
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE, "add_bos_token": False}
    _write(out / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write(out / "training.json", json.loads((run / "log.json").read_text()))
    _checksum(out, source)


def export_head(trained: Path, target: Path, out: Path, *, source: str, own: Sequence[Path] = ()) -> None:
    """A head's folder: draft.safetensors, which names its target's weights by digest, training.json, a manifest.

    target is the folder of the model that the head was trained for. A README.md is written where there is none, and
    anew where there is something to add: what bench_speculation --json wrote of the head in the model's `own` text.
    """
    out.mkdir(parents=True, exist_ok=True)
    config, tensors = read(trained / "draft.safetensors")
    config = msgspec.structs.replace(config, digest=manifest.digest(target))
    metadata = {"format": "pt", METADATA: msgspec.json.encode(config).decode()}
    save_file(tensors, out / "draft.safetensors", metadata=metadata)
    report = json.loads((trained / "report.json").read_text())
    _write(out / "training.json", report)
    if own or not (out / "README.md").exists():
        size, measured = (out / "draft.safetensors").stat().st_size, [json.loads(path.read_text()) for path in own]
        (out / "README.md").write_text(cards.head(config, report, size, measured), encoding="utf-8")
    _checksum(out, source)


def _checksum(folder: Path, source: str) -> None:
    """A manifest without times: the folder is meant to be copied and versioned."""
    manifest.write(folder, source=source)
    found = manifest.read(folder)
    assert found is not None, "it has just been written"
    for entry in found["files"].values():
        entry["mtime_ns"] = 0
    _write(folder / manifest.NAME, found)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a model: the folder that `run` wrote")
    parser.add_argument("--tokenizer", type=Path, help="a model: tokenizer.json that `prepare` wrote or kept")
    parser.add_argument("--head", type=Path, help="a draft head: the folder that `heads` wrote")
    parser.add_argument("--target", type=Path, help="a draft head: the folder of its model, exported")
    parser.add_argument("--own", type=Path, nargs="*", default=[], help="a draft head: bench_speculation's JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.run and args.tokenizer:
        export(args.run, args.tokenizer, args.out, source="flowinfer.train")
    elif args.head and args.target:
        export_head(args.head, args.target, args.out, source="flowinfer.train", own=args.own)
    elif not any((args.run, args.tokenizer, args.head, args.target)) and manifest.read(args.out):
        _checksum(args.out, "flowinfer.train")
    else:
        parser.error(
            "give --run and --tokenizer for a model, or --head and --target for a draft head, "
            "or --out alone for a folder that has a manifest, to renew that after its card was edited"
        )


if __name__ == "__main__":
    main()
