"""Step times are measured once for a model on a machine; a file of anything else, or a damaged one, is made again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flowinfer.engine.cost import StepTimeModel
from flowinfer.engine.pool import KVPool
from flowinfer.stages.spec_verify import profile
from flowinfer.stages.spec_verify.costs import StepTable


class FakeEngine:
    """Counts the steps that it is asked to run; each is checked to fit its blocks."""

    def __init__(self, threads: int = 1, dtype: torch.dtype = torch.float32, num_blocks: int = 40) -> None:
        config = SimpleNamespace(max_positions=4096, vocab_size=50)
        self.model: Any = SimpleNamespace(device=torch.device("cpu"), dtype=dtype, config=config)
        self.layout: Any = SimpleNamespace(digest="abc", block_tokens=64, blocks_for=lambda count: -(-count // 64))
        self.ctx: Any = SimpleNamespace(threads=threads)
        self.pool = KVPool(0, num_blocks, cached_limit=0, on_stored=len, on_removed=len)  # type: ignore[arg-type]
        self.cost = StepTimeModel()
        self.rows: list[int] = []

    def forward(self, tokens: Any, counts: Any, kv_lens: Any, tables: Any) -> None:
        assert counts.sum() == len(tokens) and (counts > 0).all() and (kv_lens >= counts).all()
        assert tables.shape == (len(counts), self.layout.blocks_for(int(kv_lens.max())))
        assert tables.max() < self.pool.num_blocks and tokens.max() < 50
        self.rows.append(len(tokens))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_a_table_is_measured_once_and_kept(engine: FakeEngine, tmp_path: Path) -> None:
    first = profile.step_table(engine, 24, tmp_path)  # type: ignore[arg-type]
    assert first.usable and first.rows == (1, 4, 16, 24) and set(engine.rows) >= set(first.rows)
    num_steps = len(engine.rows)
    assert profile.step_table(engine, 24, tmp_path) == first  # type: ignore[arg-type]
    assert len(engine.rows) == num_steps and engine.pool.num_free == 40


@pytest.mark.parametrize("other", [FakeEngine(threads=2), FakeEngine(dtype=torch.bfloat16)])
def test_other_settings_have_a_table_of_their_own(engine: FakeEngine, other: FakeEngine, tmp_path: Path) -> None:
    keys = {profile.step_table(one, 8, tmp_path).key for one in (engine, other)}  # type: ignore[arg-type]
    assert len(keys) == 2 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "impossible", "no json"])
def test_a_file_that_cannot_be_right_is_made_again(engine: FakeEngine, tmp_path: Path, damage: str) -> None:
    good = profile.step_table(engine, 8, tmp_path)  # type: ignore[arg-type]
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    foreign = StepTable(key="other", rows=good.rows, seconds=good.seconds)
    impossible = StepTable(key=good.key, rows=good.rows, seconds=tuple(-s for s in good.seconds))
    bad = {
        "cut": data[:-9],
        "empty": b"",
        "foreign": msgspec.json.encode(foreign),
        "impossible": msgspec.json.encode(impossible),
        "no json": b"\x80\x81",
    }
    file.write_bytes(bad[damage])
    engine.rows.clear()
    assert profile.step_table(engine, 8, tmp_path).usable and engine.rows  # type: ignore[arg-type]
    assert profile.load_table(file, good.key) is not None


def test_a_disk_that_takes_nothing_costs_only_the_file(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert profile.step_table(engine, 4, tmp_path / "file").usable  # type: ignore[arg-type]


def test_captured_sizes_are_stairs(engine: FakeEngine, tmp_path: Path) -> None:
    table = profile.step_table(engine, 24, tmp_path, captured=[1, 8, 24])  # type: ignore[arg-type]
    assert table.rows == (1, 8, 24) and table.staircase


def test_measuring_ends_with_its_budget(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "BUDGET_S", 0.0)
    assert profile.step_table(engine, 512, tmp_path).rows == (1, 4)  # type: ignore[arg-type]


def test_few_blocks_are_shared(tmp_path: Path) -> None:
    small = FakeEngine(num_blocks=3)
    assert profile.step_table(small, 64, tmp_path).usable  # type: ignore[arg-type]
    assert small.pool.num_free == 3


def test_a_guess_rises_with_rows(engine: FakeEngine) -> None:
    table = profile.guessed_table(engine, 100)  # type: ignore[arg-type]
    assert table.usable and (np.diff(table.seconds) > 0).all()
