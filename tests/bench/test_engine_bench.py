"""The engine's benchmark: its roofline against sums done by hand, and a whole run on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowinfer.bench.__main__ import measure
from flowinfer.bench.roofline import Op, Rates, decode_ops, expected_touched, prefill_ops, roofline
from flowinfer.engine.models.config import parse_config
from flowinfer.engine.models.named import CONFIGS
from flowinfer.errors import FlowInferError

H200 = Rates(read=4.15e12, matmul=770e12)
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "eos_token_id": 2,
}


def test_an_op_takes_the_longer_of_its_two_times() -> None:
    assert Op("bytes", 8.3e12, 1.0).seconds(H200) == pytest.approx(2.0)
    assert Op("flops", 1.0, 77e12).seconds(H200) == pytest.approx(0.1)
    assert roofline([Op("a", 4.15e12, 0), Op("b", 0, 770e12)], H200) == pytest.approx(2.0)


def test_a_single_stream_reads_the_weights_and_its_keys_and_values() -> None:
    config = parse_config(CONFIGS["qwen3-8b"])
    read = sum(op.bytes for op in decode_ops(config, 1, 1024))
    weights = (config.num_params - config.vocab_size * config.hidden_size) * 2  # the embedding is looked up, not read
    kv = 1024 * 36 * 2 * 8 * 128 * 2
    assert read == pytest.approx(weights + kv, rel=2e-3)


def test_a_batch_reads_no_expert_that_it_does_not_touch() -> None:
    config = parse_config(CONFIGS["qwen3-30b-a3b"])
    expert = 3 * 2048 * 768 * 2 * 48
    few, more = (sum(op.bytes for op in decode_ops(config, 8, 1024, touched=n)) for n in (50, 60))
    assert more - few == pytest.approx(10 * expert)
    assert expected_touched(128, 8, 1) == pytest.approx(8)
    assert expected_touched(128, 8, 8) == pytest.approx(51.6, abs=0.1)


def test_prefill_multiplies_every_weight_and_half_of_all_pairs() -> None:
    config = parse_config(CONFIGS["qwen3-8b"])
    flops = sum(op.flops for op in prefill_ops(config, 8, 8192))
    products = config.num_params - 2 * config.vocab_size * config.hidden_size
    pairs = 8 * 8192 * 8193 / 2
    assert flops == pytest.approx(2 * products * 65_536 + 4 * 32 * 128 * 36 * pairs, rel=1e-6)


def test_a_run_prints_a_row_a_cell_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    file = tmp_path / "out.json"
    settings = {"config": str(tmp_path), "random_weights": True, "context": 70, "steps": 6, "device": "cpu"}
    measure(batch="1,3", prefill="2x90", profile="", json=file, **settings)
    report = json.loads(file.read_text())
    assert [cell["name"] for cell in report["cells"]] == ["prefill, 2 x 90", "decode, 1 x 70", "decode, 3 x 70"]
    assert all(cell["value"] > 0 and cell["roofline"] > 0 for cell in report["cells"])
    assert report["rates"]["read"] > 0 and report["device"] and report["date"]
    assert capsys.readouterr().out.count("decode, 3 x 70") == 2


@pytest.mark.parametrize(("batch", "prefill"), [("1,x", "0"), ("1", "8"), ("1", "0x4"), ("1", "axb")])
def test_what_cannot_be_read_is_told(batch: str, prefill: str) -> None:
    with pytest.raises(FlowInferError, match="isn't a"):
        measure(batch=batch, prefill=prefill, profile="", json=None)


BARE = """
import importlib.abc, sys
NEEDS = {"torch", "triton", "numpy", "msgspec", "pydantic", "yaml"}
OTHERS = {
    "zmq", "networkx", "tokenizers", "safetensors", "jinja2", "starlette", "uvicorn", "uvloop", "httptools",
    "prometheus_client", "grafana_client", "click", "rich", "huggingface_hub", "llguidance", "xxhash", "gguf",
    "transformers", "multipart",
}
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from flowinfer.bench.__main__ import main
main(sys.argv[1:])
"""


def test_it_runs_where_only_the_engines_own_needs_are_installed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = ["--config", str(tmp_path), "--random-weights", "--batch", "2", "--context", "20", "--steps", "3"]
    command = [sys.executable, "-c", BARE, *options, "--prefill", "0", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "decode, 2 x 20" in done.stdout
