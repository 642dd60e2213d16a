"""`flowinfer bench`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from flowinfer.cli import main

HEAD = str(Path(__file__).parents[1] / "data/traces/mooncake_conversation_head.jsonl")


def test_bench_cache_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    args = ["bench", "cache", "--trace", HEAD, "--sizes", "50%", "--workers", "2", "--json", str(out)]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0
    assert "120 requests, 3,535 blocks of 512 tokens, 3,416 different" in result.stdout
    figures = json.loads(out.read_text())
    assert [o["policy"] for o in figures["outcomes"]] == ["unlimited", "expiry 5min", "lru", "density", "optimum"]
    assert {o["hits"] for o in figures["outcomes"]} == {119}
    assert [r["way"] for r in figures["dispatch"]] == ["pull", "bucket", "hash", "prefix", "bucket+prefix"]


def test_bench_cache_tells_what_sizes_look_like() -> None:
    result = CliRunner().invoke(main, ["bench", "cache", "--trace", HEAD, "--sizes", "a lot"])
    assert result.exit_code == 2 and "as in 1%,10%,5000" in result.stderr
