"""Speculation on a device against none: the same tokens? `python tests/bench/check_speculation.py --device cuda:0`.

Runs the decode loop over small random models and flowinfer-mini with every drafter and schedule, greedy, sampled and
penalised, with little memory too, and prints JSON: requests whose tokens are equal, drafts, steps and seconds. float32;
exit code 1 if a token differs. On a GPU the rows of a step with drafts go through other kernels than a plain step's, so
a tie within rounding may fall either way: what differs is listed with its place.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cpu")
parser.add_argument("--tokens", type=int, default=60, help="tokens of an answer")
parser.add_argument("--models", default="llama,qwen3,deepseek_v4,flowinfer-mini")
options = parser.parse_args()
os.environ["FLOWINFER_TEST_DEVICE"] = options.device  # before decode_loop is read

import torch  # noqa: E402
from decode_loop import Service, prompt, save_random_llama, save_random_v4  # noqa: E402
from drafters import KINDS, Cheat, save_random_head  # noqa: E402

from flowinfer.engine import heads, hub  # noqa: E402
from flowinfer.engine.models.named import CONFIGS, RANDOM  # noqa: E402
from flowinfer.message import Prompt  # noqa: E402
from flowinfer.stages.spec_verify import sources, stage  # noqa: E402


def save_random_qwen3(folder: Path, vocab_size: int, context: int) -> None:
    """Heads are normed there; weights are made up when it is loaded."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": context}
    config = CONFIGS["qwen3-8b"] | sizes | heads | {"vocab_size": vocab_size, "eos_token_id": 2, RANDOM: True}
    (folder / "config.json").write_text(json.dumps(config))


MAKE = {"llama": save_random_llama, "qwen3": save_random_qwen3, "deepseek_v4": save_random_v4}


def main() -> None:
    """Everything, then the exit code."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            model, head = prepared(name, Path(folder) / name)
            rows += check(name, model, head)
    wrong = [row for row in rows if row["equal"] < row["of"]]
    device = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "cpu"
    print(json.dumps({"device": device, "torch": torch.__version__, "cases": rows, "wrong": len(wrong)}, indent=1))
    sys.exit(bool(wrong))


def prepared(name: str, folder: Path) -> tuple[str, str]:
    """The model by name or folder, and a head for it: its own, else an untrained one."""
    folder.mkdir()
    if name in MAKE:
        MAKE[name](folder, 96, 512)
        save_random_head(folder, folder / "draft.safetensors")
        return str(folder), ""
    if heads.shipped(name):
        return name, ""
    file = folder / "draft.safetensors"
    save_random_head(hub.resolve(name), file)
    return name, str(file)


def requests(vocab_size: int) -> list[Prompt]:
    """Six prompts of lengths around the boundaries of groups and blocks."""
    rng = random.Random(1)
    lengths = (1, 48, 126, 142, 63, 253)
    return [
        prompt(f"r{n}", rng.choices(range(3, vocab_size), k=lengths[n]), max_tokens=options.tokens, **KINDS[n])
        for n in range(len(KINDS))
    ]


def check(name: str, model: str, head: str) -> list[dict[str, Any]]:
    """A row for each way to draft."""
    vocab, block = (
        hub.describe(hub.resolve(model)).config.vocab_size,
        hub.describe(hub.resolve(model)).layout().block_tokens,
    )
    plain, _ = run(model, vocab, 4096 // block, {"draft": "none"})
    memory, small = 4096 // block, 768 // block
    own = {"draft": "model", "draft_model": model}
    ways: list[tuple[str, int, dict[str, Any]]] = [
        *((f"{draft} {schedule}", memory, {"draft": draft, "schedule": schedule, "tokens": 5, "head": head})
          for draft in ("head", "suffix", "ngram") for schedule in ("fixed", "confidence")),
        ("own model fixed", memory, {**own, "schedule": "fixed", "tokens": 5}),
        ("head fixed, preempted", small, {"draft": "head", "schedule": "fixed", "tokens": 5, "head": head}),
    ]  # fmt: skip
    rows = [row(name, way, plain, *run(model, vocab, blocks, settings)) for way, blocks, settings in ways]
    make = sources.make_drafter
    setattr(stage, "make_drafter", lambda config, batch: Cheat(batch, plain, wrong=0.15))  # noqa: B010
    try:
        for tokens in (1, 5, 8):
            found = run(model, vocab, memory, {"schedule": "fixed", "tokens": tokens})
            rows.append(row(name, f"known answers, {tokens} drafts", plain, *found))
    finally:
        setattr(stage, "make_drafter", make)  # noqa: B010
    return rows


def run(model: str, vocab: int, blocks: int, verify: dict[str, Any]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Answers, and what they took."""
    service = Service(model, num_blocks=blocks, verify=verify)
    prompts = requests(vocab)
    began = time.perf_counter()
    service.send(*prompts)
    answers = service.finish((p.id for p in prompts), seconds=120)
    seconds = time.perf_counter() - began
    ends = [service.client.ended[p.id] for p in prompts]
    service.turn(2)
    taken = {
        "drafted": sum(end.drafted_tokens for end in ends),
        "accepted": sum(end.accepted_tokens for end in ends),
        "steps": service.decode.num_steps,
        "preempted": service.decode.num_preemptions,
        "blocks_left": service.pool.num_blocks - service.pool.num_free,
        "seconds": round(seconds, 3),
    }
    service.group.close()
    return answers, taken


def row(
    name: str, way: str, plain: dict[str, list[int]], answers: dict[str, list[int]], taken: dict[str, Any]
) -> dict[str, Any]:
    """How many answers are equal, and where the first of the others differ."""
    differ = {}
    for id, tokens in plain.items():
        if answers[id] != tokens:
            pairs = zip(tokens, answers[id], strict=False)
            differ[id] = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(answers[id])))
    equal = len(plain) - len(differ)
    found = {"model": name, "way": way, "equal": equal, "of": len(plain), **taken}
    return found | ({"first_difference": differ} if differ else {})


if __name__ == "__main__":
    main()
