"""Batch-invariant mode: logits and KV of a token have the same bytes alone and in any batch, whatever the chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bench_invariant import Runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.engine import hub
from flowinfer.engine.models import load
from flowinfer.engine.models.invariant import Invariance, RowsLinear, plain_silu, prove_rows
from flowinfer.engine.models.linear import Linear
from flowinfer.engine.models.named import RANDOM
from flowinfer.errors import ModelError
from flowinfer.kernels import compiled

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    RANDOM: True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"num_key_value_heads": 6},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": EXPERTS,
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
COMPILED = [f"{name} compiled" for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")]
TILED = [f"{name} tiled" for name in ("LlamaForCausalLM", "Qwen3ForCausalLM") if compiled.pairs_pay()]
TILES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
BLOCKS = 48


def make(folder: Path, dtype: str, *, invariant: bool = True) -> Runner:
    """A model over an arena in which an earlier tenant left numbers."""
    torch.set_num_threads(1)
    runner = Runner(folder, dtype, "cpu", invariant=invariant, blocks=BLOCKS)
    runner.kv.normal_(generator=torch.Generator().manual_seed(1))
    return runner


def alone(runner: Runner, tokens: np.ndarray) -> torch.Tensor:
    """Logits of all tokens, run in one go with nothing beside them."""
    logits: torch.Tensor = runner.run([(tokens, 0, np.arange(-(-len(tokens) // runner.block)) + 1)])[0].clone()
    return logits


def folder_of(root: Path, architecture: str, sizes: dict[str, Any]) -> Path:
    folder = root / architecture
    folder.mkdir(exist_ok=True)
    config = SMALL | FAMILIES[architecture] | {"architectures": [architecture]} | sizes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Runner]:
    return {}


def runner(models: dict[tuple[str, str], Runner], root: Path, name: str, dtype: str) -> Runner:
    """Of names that end in "compiled" and "tiled": by compiled loops, however small the model is."""
    if (name, dtype) not in models:
        architecture, _, way = name.partition(" ")
        sizes = TILES if way == "tiled" else {}
        folder = hub.resolve(name) if name == "flowinfer-mini" else folder_of(root, architecture, sizes)
        with pytest.MonkeyPatch.context() as patch:
            if way:
                patch.setattr(load, "COMPILED_FROM", 0)
            models[name, dtype] = make(folder, dtype)
        kind = "TiledModel" if way == "tiled" and dtype == "bfloat16" else "CompiledModel"
        assert type(models[name, dtype].model).__name__ == kind or not way
    return models[name, dtype]


def text(count: int, seed: int, vocab: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, vocab, count).astype(np.int32)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Lengths of some sequences, and steps over them: (sequence, tokens of it that the step runs), in any order."""
    lengths = draw(st.lists(st.integers(3, 330), min_size=2, max_size=5))
    left, steps = list(lengths), list[list[tuple[int, int]]]()
    while any(left):
        open_ = [i for i, n in enumerate(left) if n]
        members = draw(st.permutations(open_))[: draw(st.integers(1, len(open_)))]
        step = []
        for i in members:
            chunk = draw(st.sampled_from([1, 1, 2, 5, 17, 64, 130, 400]))
            if len(steps) > 12:
                chunk = left[i]
            step.append((i, min(left[i], chunk)))
            left[i] -= step[-1][1]
        steps.append(step)
    return lengths, steps


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*FAMILIES, *COMPILED, *TILED, pytest.param("flowinfer-mini", marks=pytest.mark.slow)])
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=schedules())
def test_bytes_are_the_same_in_any_batch_and_any_chunks(
    models: dict[tuple[str, str], Runner], tmp_path: Path, name: str, dtype: str, plan: Any
) -> None:
    run = runner(models, tmp_path, name, dtype)
    lengths, steps = plan
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    places = iter(np.random.default_rng(7).permutation(BLOCKS))
    tables = [np.array([next(places) for _ in range(-(-n // run.block))], np.int32) for n in lengths]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    for step in steps:
        logits = run.run([(texts[i][done[i] : done[i] + n], done[i], tables[i]) for i, n in step])
        for (i, n), rows in zip(step, logits, strict=True):
            found[i].append(rows)
            done[i] += n
    for tokens, rows in zip(texts, found, strict=True):
        assert torch.equal(torch.cat(rows), alone(run, tokens))


def test_deepseek_v4_has_the_same_bytes_in_a_batch_and_in_chunks() -> None:
    run = make(hub.resolve("flowinfer-mini"), "bfloat16")
    tokens, other = text(150, 1), text(40, 2)
    whole = alone(run, tokens)
    table, beside = np.array([7, 9]), np.array([3])
    pieces = [run.run([(other[:31], 0, beside), (tokens[:131], 0, table)])[1]]
    pieces += [run.run([(tokens[i : i + 3], i, table), (other[31:33], 31, beside)])[0] for i in range(131, 149, 3)]
    pieces.append(run.run([(tokens[149:], 149, table)])[0])
    assert torch.equal(torch.cat(pieces), whole)


def test_without_the_mode_a_batch_changes_bytes(tmp_path: Path) -> None:
    run = make(folder_of(tmp_path, "LlamaForCausalLM", {}), "float32", invariant=False)
    tokens = text(200, 1)
    pieces = [run.run([(tokens[i : i + 1], i, np.arange(4) + 1)])[0] for i in range(len(tokens))]
    assert not torch.equal(torch.cat(pieces), alone(run, tokens))


def test_contexts_beyond_a_split_keep_their_bytes(models: dict[tuple[str, str], Runner], tmp_path: Path) -> None:
    run = runner(models, tmp_path, "LlamaForCausalLM", "bfloat16")
    tokens = text(1400, 3)
    table = np.arange(22)
    whole = alone(run, tokens)
    run.run([(tokens[:1390], 0, table)])
    beside = (text(3, 9), 0, np.array([30]))
    pieces = [run.run([beside, (tokens[i : i + 2], i, table)])[1] for i in range(1390, 1400, 2)]
    assert torch.equal(torch.cat(pieces), whole[1390:])


class Uneven:
    """A product that rounds by the number of rows, up to a number of them."""

    def __init__(self, inner: Linear, until: int) -> None:
        self.inner, self.until = inner, until

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self.inner(x_TI) + (len(x_TI) if len(x_TI) < self.until else 0)


class BySize(Uneven):
    """One that rounds by the exact number of rows."""

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.inner.weight_OI @ row for row in x_TI]) + len(x_TI)


class ByPlace(Uneven):
    """One that rounds by a row's place."""

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.inner.weight_OI @ row for row in x_TI]) + torch.arange(len(x_TI)).unsqueeze(1)


def _linear(rows: int = 8, columns: int = 8) -> Linear:
    return Linear(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16())


@pytest.mark.parametrize(("until", "least"), [(3, 4), (9, 16)])
def test_the_probe_finds_the_least_rows(until: int, least: int) -> None:
    inner = Uneven(_linear(), until)
    assert prove_rows(inner, torch.Size((8, 8)), torch.bfloat16)[0] == least
    padded = RowsLinear(inner, least=least, most=128)
    x = torch.randn(300, 8).bfloat16()
    assert torch.equal(padded(x[:1]), padded(x)[:1])


def test_a_product_that_hangs_on_every_count_runs_in_tiles() -> None:
    inner = BySize(_linear(), 0)
    least, most, tile = prove_rows(inner, torch.Size((8, 8)), torch.bfloat16)
    assert (least, most, tile) == (16, 16, True)
    padded = RowsLinear(inner, least=least, most=most, tile=tile)
    x = torch.randn(40, 8).bfloat16()
    assert torch.equal(padded(x[17:18]), padded(x)[17:18])


def test_a_product_that_hangs_on_places_is_refused() -> None:
    with pytest.raises(ModelError, match=r"products of \[8, 8\] in bfloat16 differ by the rows beside them"):
        prove_rows(ByPlace(_linear(), 0), torch.Size((8, 8)), torch.bfloat16)


def test_no_rows_give_no_rows() -> None:
    assert RowsLinear(_linear(), least=4, most=8)(torch.zeros(0, 8).bfloat16()).shape == (0, 8)


def test_silu_of_the_mode_is_silu() -> None:
    x = torch.randn(1000) * 8
    torch.testing.assert_close(plain_silu(x), F.silu(x))
    assert Invariance(torch.device("cpu"), torch.bfloat16).silu is F.silu


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[Runner]:
    yield make(smollm2, "bfloat16")


def test_real_text_in_a_batch_has_its_own_bytes(smol: Runner, smollm2: Path) -> None:
    from flowinfer.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    lines = ("The sea was calm that morning, and", "def fib(n):\n    if n < 2:", "In 1969 the first people walked on")
    texts = [tokenizer.encode_plain(line) for line in lines]
    tables = [np.array([i + 1]) for i in range(3)]
    single = [smol.run([(tokens, 0, table)])[0] for tokens, table in zip(texts, tables, strict=True)]
    together = smol.run([(tokens, 0, table) for tokens, table in zip(texts, tables, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(single, together, strict=True))
    smol.run([(texts[0][:3], 0, tables[0]), (texts[2][:2], 0, tables[2])])
    rest = smol.run([(texts[2][2:], 2, tables[2]), (texts[0][3:], 3, tables[0])])
    assert torch.equal(rest[1], single[0][3:]) and torch.equal(rest[0], single[2][2:])
