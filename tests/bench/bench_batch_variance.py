"""What a batch does to greedy answers: which prompts get another one than alone, from which token on, in both modes.

PYTHONPATH=. python tests/bench/bench_batch_variance.py [--model smollm2-135m] [--prompts 24] [--tokens 32]

Each prompt is English text, asked for alone and then with all the others. Without batch_invariant the library adds a
row's terms in another order when other rows are there; where two tokens are nearly as good, that decides.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_invariant import MODES, greedy, machine, service
from harness import english

from flowinfer.engine import hub
from flowinfer.text.tokenizer import load_tokenizer


def main() -> None:
    """Prints a line a mode, and the first answer that parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {"machine": machine(asked.device), "model": asked.model, "dtype": asked.dtype, "prompts": asked.prompts}
    found |= {mode: measure(asked, invariant=mode == "invariant") for mode in MODES}
    for mode in MODES:
        print(f"{mode}: {len(found[mode])} of {asked.prompts} answers differ in a batch of {asked.prompts}")
    for parted in found["default"][:1]:
        print(json.dumps(parted, indent=1, ensure_ascii=False))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def measure(asked: Any, *, invariant: bool) -> list[dict[str, Any]]:
    """Answers that differ, those that part first in front."""
    path = hub.resolve(asked.model)
    tokenizer = load_tokenizer(path)
    texts = [english(24 + 3 * i, i) for i in range(asked.prompts)]
    prompts = [np.asarray(tokenizer.encode_plain(text), np.int32) for text in texts]
    changes = {"max_batch": asked.prompts, "verify": {"draft": "none"}, "num_blocks": 8 * asked.prompts}
    with service(path, asked, invariant=invariant, **changes) as engine:
        alone = [answer for prompt in prompts for answer in greedy(engine, [prompt], asked.tokens)]
        together = greedy(engine, prompts, asked.tokens)
    parted = []
    for text, a, b in zip(texts, alone, together, strict=True):
        if a != b:
            at = next(i for i in range(len(a)) if a[i] != b[i])
            ends = {"alone": tokenizer.decode(a[at:]), "in_the_batch": tokenizer.decode(b[at:])}
            parted.append({"prompt": text[-60:], "token": at + 1, "before": tokenizer.decode(a[:at]), **ends})
    return sorted(parted, key=lambda one: one["token"])


if __name__ == "__main__":
    main()
