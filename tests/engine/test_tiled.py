"""The decoder in one call: exactly what its parts give one by one, over any steps, and beside other models."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.engine.models import load
from flowinfer.engine.models.named import RANDOM
from flowinfer.engine.step import Features, StepInput
from flowinfer.kernels import compiled

if not compiled.pairs_pay():
    pytest.skip("needs a CPU on which tiles of bfloat16 pairs are the fastest", allow_module_level=True)

from flowinfer.engine.models.compiled import CompiledModel
from flowinfer.engine.models.tiled import TiledModel

BLOCK, BLOCKS = 64, 40
SMALL: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, RANDOM: True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1, "num_attention_heads": 7},
    "Qwen3ForCausalLM": {"head_dim": 128, "num_attention_heads": 2},
    "LlamaForCausalLM, small heads": {"head_dim": 32},  # whose pages are read by the loops for any size
}


def model_of(folder: Path, name: str, dtype: str = "bfloat16", weights: str = "checkpoint", **settings: Any) -> Any:
    family = {"architectures": [name.partition(",")[0]]}
    (folder / "config.json").write_text(json.dumps(SMALL | FAMILIES[name] | settings | family))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "COMPILED_FROM", 0)
        return load.load(folder, dtype=dtype, device="cpu", weights=weights)


@pytest.fixture(scope="module", params=[*FAMILIES, "int8", "int4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TiledModel:
    name, weights = (
        ("Qwen3ForCausalLM", request.param) if request.param in ("int8", "int4") else (request.param, "checkpoint")
    )
    made = model_of(tmp_path_factory.mktemp("model"), name, weights=weights)
    assert type(made) is TiledModel
    return made


def arena(model: Any) -> torch.Tensor:
    config = model.config
    shape = (BLOCKS, config.num_layers, 2, BLOCK, config.num_kv_heads, config.head_dim)
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def step_of(parts: list[tuple[int, int]], rows: torch.Tensor | None, seed: int = 0, layers: Any = None) -> StepInput:
    """parts: context before and tokens of each sequence; each has its own blocks."""
    counts = np.array([count for _, count in parts], np.int32)
    lengths = np.array([before + count for before, count in parts], np.int32)
    width = -(-int(lengths.max()) // BLOCK)
    tables = np.random.default_rng(1).permutation(BLOCKS)[: width * len(parts)].reshape(len(parts), width)
    return StepInput(
        tokens=torch.from_numpy(np.random.default_rng(seed).integers(0, 200, int(counts.sum()))),
        positions=torch.cat([torch.arange(before, before + count) for before, count in parts]),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        kv_lens=lengths,
        block_tables=tables.astype(np.int32),
        logit_rows=rows,
        features=None if layers is None else Features(layers),
    )


def both(model: TiledModel, parts: list[tuple[int, int]], rows: Any, layers: Any = None) -> list[Any]:
    """(logits, kv, features) of the step by one call and by its parts, behind the same contexts."""
    found = []
    for forward in (TiledModel.forward, CompiledModel.forward):
        kv = arena(model)
        if any(before for before, _ in parts):
            before = [(0, max(1, length)) for length, _ in parts]
            padded = step_of(before, None, seed=9)
            tables = step_of(parts, None).block_tables
            object.__setattr__(padded, "block_tables", tables)
            assert forward(model, padded, kv) is None
        step = step_of(parts, rows, layers=layers)
        logits = forward(model, step, kv)
        found.append((logits, kv, step.features))
    return found


parts = st.lists(
    st.tuples(st.sampled_from([0, 1, 15, 64, 200, 530]), st.sampled_from([1, 1, 2, 6, 20, 70])), min_size=1, max_size=4
)


@given(parts=parts, data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_one_call_gives_the_bytes_of_its_parts(model: TiledModel, parts: list[tuple[int, int]], data: Any) -> None:
    tokens = sum(count for _, count in parts)
    wanted = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=9))
    layers = data.draw(st.sampled_from([None, (1,), (2, 0), (2,)]))
    one, other = both(model, parts, torch.tensor(wanted), layers)
    assert one[0].shape == (len(wanted), 200) and torch.equal(one[0], other[0])
    assert torch.equal(one[1].nan_to_num(), other[1].nan_to_num()) and torch.equal(one[1].isnan(), other[1].isnan())
    if layers:
        assert torch.equal(one[2].joined(), other[2].joined()) and not one[2].joined().isnan().any()


def test_a_step_without_logits_writes_the_same_keys_and_values(model: TiledModel) -> None:
    (none, kv, _), (_, other, _) = both(model, [(0, 100), (70, 3)], None)
    assert none is None and torch.equal(kv.nan_to_num(), other.nan_to_num())


def test_logits_are_those_of_plain_torch(tmp_path: Path) -> None:
    for name in FAMILIES:
        torch.manual_seed(3)
        made = model_of(tmp_path, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "COMPILED_FROM", 1 << 60)
            plain = load.load(tmp_path, dtype="float32", device="cpu")
        step = step_of([(0, 90), (0, 5)], torch.arange(95))
        kv = arena(made)
        got, want = made.forward(step, kv), plain.forward(step, torch.full_like(kv, float("nan"), dtype=torch.float32))
        assert float((got - want).abs().max()) < 0.06 * float(want.std()), name


def test_weights_of_8_bits_are_multiplied_by_tiles_of_bytes_alone(tmp_path: Path) -> None:
    eight, plain = (model_of(tmp_path, "LlamaForCausalLM", weights=weights) for weights in ("int8-only", "checkpoint"))
    assert type(eight) is TiledModel and eight._phases.rounds and not plain._phases.rounds
    step = step_of([(0, 90), (0, 5)], torch.arange(95))
    got, want = (model.forward(step, arena(model)) for model in (eight, plain))
    assert 0 < float((got - want).norm() / want.norm()) < 0.05


def test_two_threads_may_step_at_once(model: TiledModel) -> None:
    steps = [step_of([(0, count)], torch.arange(count), seed=count) for count in (3, 90, 17, 64)]
    want = [model.forward(step, arena(model)) for step in steps]
    got: list[Any] = [None] * len(steps)

    def run(i: int) -> None:
        for _ in range(5):
            got[i] = model.forward(steps[i], arena(model))

    workers = [threading.Thread(target=run, args=(i,)) for i in range(len(steps))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_sizes_without_tiles_and_other_dtypes_take_the_calls_one_by_one(tmp_path: Path) -> None:
    assert type(model_of(tmp_path, "LlamaForCausalLM", intermediate_size=200)) is CompiledModel
    assert type(model_of(tmp_path, "LlamaForCausalLM", "float32")) is CompiledModel
