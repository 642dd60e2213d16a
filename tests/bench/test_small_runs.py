"""Benchmarks of a device run whole on a tiny model on a CPU, so that they still run where their figures are taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_itl
import bench_load
import pytest

TINY = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "dtype": "float32", "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, bench: object, *options: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", *map(str, options)])
    bench.main()  # type: ignore[attr-defined]


def test_gaps_under_load_are_told_for_each_budget(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config / "out.json"
    sizes = ("--streams", 2, "--context", 9, "--prompt", 100, "--prompts", 2, "--steps", 3)
    run(monkeypatch, bench_itl, "--config", config, *sizes, "--budgets", "20,0", "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert [row["step_budget_ms"] for row in rows] == [20, None]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["most_ms"] and row["ttft_s"] > 0 for row in rows)


def test_weights_are_written_loaded_and_compared(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config / "out.json"
    run(monkeypatch, bench_load, "--config", config, "--folder", config, "--starts", 0, "--json", file)
    found = json.loads(file.read_text())
    assert found["load"][0]["gb_s"] > 0 and found["bytes"] > 2 * 2 * 300 * 32
    assert not list(config.glob("flowinfer-load-*")), "what was written is removed"
