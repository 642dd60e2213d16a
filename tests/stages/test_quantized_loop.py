"""All stages on a model in 4 bits: it answers, and its KV is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowinfer.graph import load_plan
from flowinfer.message import Call, Sampling
from flowinfer.runtime.local import LocalService

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"


def served(weights: str) -> tuple[list[Any], Any, Any]:
    """Two answers to one prompt, the second of which reuses the first one's blocks; the engine and cache-lookup."""
    sets = ["vars.model=flowinfer-mini", "workers={front: {threads: 1, kv_memory: 64MiB, device: cpu}}"]
    sets += [f"stages.decode.with.weights={weights}"]
    torch.set_num_threads(1)
    prompt = np.arange(20, 300, dtype=np.int32)
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LocalService(load_plan(QUICKSTART, sets=sets)) as service:
        found = [service.generate([Call(id=id, sampling=sampling, prompt=prompt)])[id] for id in ("a", "b")]
        stages: tuple[Any, Any] = service.stage("decode"), service.stage("lookup")
        return found, stages[0].engine, stages[1]


def test_a_model_in_4_bits_answers_and_keeps_its_kv_apart() -> None:
    (first, again), engine, lookup = served("int4")
    texts = ["".join(piece.text + piece.reasoning for piece in pieces) for pieces in (first, again)]
    assert texts[0] and texts[0] == texts[1]
    assert again[0].opened.cached_tokens >= 128
    assert engine.layout.quantized == "int4" and engine.namespace == lookup._namespace
    _, plain, _ = served("checkpoint")
    assert plain.layout.quantized == "" and plain.namespace != engine.namespace
    assert plain.layout.block_bytes == engine.layout.block_bytes
