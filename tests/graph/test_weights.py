"""What a model's small files say against it is a mistake at check time; what a GPU makes of its weights is a note."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowinfer.engine import hub
from flowinfer.errors import Problem
from flowinfer.graph import devices
from flowinfer.graph.checker import check
from flowinfer.graph.model import Graph
from flowinfer.graph.weights import notes
from flowinfer.spec import load

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "pipelines" / "quickstart.yaml"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "flowinfer_random_weights": True,
}


def checked(model: str, *sets: str) -> Graph:
    return check(load(QUICKSTART, sets=(f"vars.model={model}", *sets)))


def problems(model: object, *sets: str) -> list[Problem]:
    return list(checked(str(model), *sets).problems)


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    return path


def test_a_model_that_runs_is_no_problem(tmp_path: Path) -> None:
    assert problems(folder(tmp_path)) == []
    assert problems("flowinfer-mini") == []


def test_a_model_that_isnt_here_is_no_mistake_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path))
    assert problems("smollm2-135m") == problems("some/model") == []


@pytest.mark.parametrize(
    ("changes", "words", "help"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq' of 4 bits isn't supported", "bfloat16"),
        ({"architectures": ["MambaForCausalLM"]}, "unknown architecture MambaForCausalLM", "Known:"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' isn't supported", "'silu'"),
        ({"flowinfer_random_weights": False}, "holds no *.safetensors", "converted"),
        ({"dtype": "float16"}, "its weights are float16", "dtype: bfloat16"),
    ],
)
def test_what_speaks_against_a_model_is_told_once(
    tmp_path: Path, changes: dict[str, Any], words: str, help: str
) -> None:
    (found,) = problems(folder(tmp_path, **changes))
    assert found.code == "FI326" and words in found.message and help in found.help
    assert found.mark is not None and found.mark.file.endswith(".yaml")


def test_float16_runs_in_another_dtype(tmp_path: Path) -> None:
    assert problems(folder(tmp_path, dtype="float16"), "stages.prefill.with.dtype=bfloat16") == []


def test_a_damaged_download_is_told(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    (found,) = problems(tmp_path)
    assert "model.safetensors can't be read" in found.message


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((9, 0), "there is no kernel for products of FP8 weights of this model"),
        ((8, 0), "compute capability 8.9; cuda:0 has 8.0"),
    ],
)
def test_a_gpu_gets_fp8_weights_as_the_models_dtype(capability: tuple[int, int], words: str) -> None:
    graph = checked("flowinfer-mini", "workers={front: {device: cuda:0}}")
    (note,) = notes(graph, lambda device: capability)
    assert "FP8 become bfloat16 as they are loaded, 27 MiB" in note and words in note
    assert notes(checked("flowinfer-mini")) == []


def test_plain_weights_need_no_note(tmp_path: Path) -> None:
    assert notes(checked(str(folder(tmp_path)), "workers={front: {device: cuda:0}}"), lambda device: (9, 0)) == []


def test_the_capability_is_asked_of_the_gpu_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_capability", lambda index: (9, index))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert devices.capability("cuda:0") == (9, 3) and devices.capability("cuda:1") == (9, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert devices.capability("cuda:0") == (9, -1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.capability("cuda:2") == (9, 2)
    assert devices.capability("cpu") is None


def test_a_gpu_that_isnt_there_has_no_capability() -> None:
    assert devices._capability(-1) is None


def test_neither_imports_torch() -> None:
    code = f"""
import sys
from flowinfer.graph.checker import check
from flowinfer.graph.weights import notes
from flowinfer.spec import load
graph = check(load({str(QUICKSTART)!r}, sets=("vars.model=flowinfer-mini", "workers={{front: {{device: cuda:0}}}}")))
assert notes(graph) and not graph.problems
assert "torch" not in sys.modules and "safetensors" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_known_fetches_and_converts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert hub.known(str(tmp_path / "model.gguf")) is None
    assert hub.known("smollm2-135m") is None and hub.known("no/such") is None
    made = folder(tmp_path / "model")
    assert hub.known(str(made)) == made


PROD = ROOT / "pipelines" / "prod.yaml"


def prod(*sets: str) -> Graph:
    model = "vars.model=flowinfer-mini"
    return check(load(PROD, sets=(model, "workers.prefill.device=cpu", "workers.decode.device=cpu", *sets)))


def test_weights_written_once_hold_for_all_stages_of_the_model() -> None:
    graph = prod("stages.decode.with.weights=int4")
    assert not graph.problems
    uses = [stage.contract.model for stage in graph.stages.values() if stage.contract and stage.contract.model]
    assert {use.packed for use in uses if use.weights} == {"int4"}
    assert graph.stages["lookup"].contract is not None and graph.stages["lookup"].contract.model is not None
    assert graph.stages["lookup"].contract.model.packed == "int4"


def test_ends_of_a_hand_over_must_have_the_same_numbers_but_not_the_same_copies() -> None:
    (found,) = prod("stages.decode.with.weights=int4", "stages.prefill.with.weights=int8").problems
    assert found.code == "FI319" and "`weights: int8`" in found.message
    apart = prod("stages.decode.with.weights=int4-only", "stages.prefill.with.weights=int4")
    assert apart.problems == []
    packed = {n: s.contract.model.packed for n, s in apart.stages.items() if s.contract and s.contract.model}
    assert (packed["lookup"], packed["prefill"], packed["transfer"]) == ("int4", "int4", "int4-only")


def test_stages_of_one_worker_share_an_engine() -> None:
    sets = ["stages.decode.with.weights=int4-only", "stages.prefill.with.weights=int4"]
    (found,) = prod(*sets, "stages.transfer.with.weights=int4").problems
    assert found.code == "FI408" and "`weights: int4-only`" in found.message


def test_weights_that_no_kernel_multiplies_say_what_would_do() -> None:
    (found,) = prod("stages.decode.with.weights=fp4").problems
    assert "compute capability 10.0" in found.message and "leave `weights` out" in found.message


def test_quantized_weights_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = prod("stages.decode.with.weights=int4", "workers.decode.device=cuda:0").problems
    assert found.code == "FI416" and "runs on cuda:0" in found.message and "device: cpu" in found.help
    monkeypatch.setattr("flowinfer.graph.invariance.count_gpus", lambda: 1)
    (found,) = prod("stages.decode.with.weights=int4", "workers.decode.device=auto").problems
    assert "`auto` is a GPU here" in found.message


def on_a_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, *sets: str) -> list[Problem]:
    monkeypatch.setattr("flowinfer.graph.weights.capability", lambda device: capability)
    return problems(*sets)


CARD = "workers={front: {device: cuda:0}}"
FP8 = "stages.decode.with.weights=fp8"


def test_fp8_needs_a_card_that_has_units_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(folder(tmp_path))
    for capability in ((9, 0), (8, 9), None):
        assert on_a_card(monkeypatch, capability, model, CARD, FP8) == []
    (found,) = on_a_card(monkeypatch, (8, 0), model, CARD, FP8)
    assert found.code == "FI416" and "capability 8.9 (it has 8.0), and" in found.message
    (found,) = problems(model, "workers={front: {device: cpu}}", FP8)
    assert found.code == "FI416" and "needs a GPU" in found.message and "weights: int8" in found.help


def test_fp8_is_for_models_in_bfloat16_whose_products_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = on_a_card(monkeypatch, (9, 0), str(folder(tmp_path, dtype="float32")), CARD, FP8)
    assert found.code == "FI416" and "runs in float32" in found.message
    (found,) = on_a_card(monkeypatch, (9, 0), "flowinfer-mini", CARD, FP8)
    assert found.code == "FI416" and "DeepSeek-V4" in found.message


def test_fp8_breaks_batch_invariance(tmp_path: Path) -> None:
    (found,) = problems(str(folder(tmp_path)), CARD, FP8, "batch_invariant=true")
    assert found.code == "FI327" and "round differently" in found.message


def test_a_checkpoint_in_fp8_stays_so_on_such_a_card(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = folder(tmp_path, flowinfer_random_weights=False, quantization_config=scheme)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: torch.zeros(32, 16).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, model / "model.safetensors")
    graph = checked(str(model), CARD)
    assert not graph.problems and notes(graph, lambda device: (9, 0)) == []
    (note,) = notes(graph, lambda device: (8, 0))
    assert "FP8 become bfloat16 as they are loaded" in note and "8.9" in note
    save_file(tensors | {name: torch.zeros(32, 16, dtype=torch.int8)}, model / "model.safetensors")
    (found,) = problems(model, CARD)
    assert found.code == "FI326"


def test_kv_dtype_written_once_holds_for_all_stages_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.graph.weights._not_of_fp8", lambda use: "")  # of another model than this one
    cards = ("workers.prefill.device=cuda:0", "workers.decode.device=cuda:0")
    graph = prod("stages.decode.with.kv_dtype=fp8", *cards)
    assert not graph.problems
    uses = {n: s.contract.model.kv for n, s in graph.stages.items() if s.contract and s.contract.model}
    assert {uses[name] for name in ("lookup", "prefill", "transfer", "decode")} == {"fp8"}


def test_kv_in_fp8_needs_a_card_and_a_model_whose_attention_reads_it(tmp_path: Path) -> None:
    kv = "stages.decode.with.kv_dtype=fp8"
    (found,) = problems(folder(tmp_path), "workers={front: {device: cpu}}", kv)
    assert found.code == "FI417" and "needs a GPU of compute capability 8.9" in found.message
    (found,) = problems("flowinfer-mini", CARD, kv)
    assert found.code == "FI417" and "DeepSeek-V4" in found.message
    (found,) = problems(folder(tmp_path), CARD, kv, "batch_invariant=true")
    assert found.code == "FI327" and "before they are rounded" in found.message
