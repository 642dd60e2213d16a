"""batch_invariant over true processes: one answer, bit for bit, however and wherever it is computed."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import Service, english, service

MODEL = "flowinfer-mini"
COMMON = (
    f"vars.model={MODEL}",
    "batch_invariant=true",
    "stages.lookup.with.tiers.memory=64MiB",
    "stages.lookup.with.tiers.write=all",
)
PROMPT = english(500, 1)


def ask(running: Service, prompt: str, **fields: Any) -> tuple[str, list[float], int]:
    """Text, log-probabilities and cached tokens of a greedy completion."""
    body = {"model": running.model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    data = json.dumps(body | {"ignore_eos": True} | fields).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.port}/v1/completions", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    choice, details = found["choices"][0], found["usage"].get("prompt_tokens_details") or {}
    return choice["text"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens", 0)


@pytest.mark.slow
def test_cold_in_a_batch_warm_from_disk_transferred_and_without_drafts(tmp_path: Path) -> None:
    threads = ("workers.prefill.threads=1", "workers.decode.threads=1")
    with service("prod.yaml", *COMMON, *threads, kv=tmp_path) as running, ThreadPoolExecutor(7) as pool:
        cold = ask(running, PROMPT)
        others = [pool.submit(ask, running, english(40 + 60 * i, 10 + i)) for i in range(5)]
        beside = pool.submit(ask, running, PROMPT, cache_salt="another")
        assert cold[2] == beside.result()[2] == 0
        assert [other.result()[0] for other in others]
        warm = ask(running, PROMPT)
        assert warm[2] > 0
    with service("colocated.yaml", *COMMON, "stages.verify.with.draft=none", kv=tmp_path) as running:
        restored = ask(running, PROMPT)
        assert restored[2] > 0
    assert beside.result()[:2] == warm[:2] == restored[:2] == cold[:2]
