"""When moe-decode looks at expert load, what it plans, and that no request depends on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from flowinfer.engine.expert_load import STEPS, LoadWindow
from flowinfer.fakes import FakeContext
from flowinfer.observe import metrics
from flowinfer.stages.moe_decode.experts import ExpertPlanner, Experts, look, misfit
from flowinfer.stages.moe_decode.stage import MoeDecode


class Decoding:
    """A planner beside a model of 2 layers and 8 experts, the first of which is hot."""

    def __init__(self, stage: str, **settings: object) -> None:
        self.ctx = FakeContext(stage)
        self.window = LoadWindow(2, 8)
        self.planner = ExpertPlanner(self.ctx, self.window, Experts.model_validate(settings))
        self.placed_at: list[int] = []

    def run(self, steps: int, hot: int = 0) -> None:
        for _ in range(steps):
            loads = np.ones((2, 8), np.int32)
            loads[:, hot] = 9
            self.window.add(loads)
            before = self.placements
            self.planner.between_steps()
            if self.placements > before:
                self.placed_at.append(self.window.num_steps)

    def sample(self, name: str, **labels: str) -> float:
        wanted = {"stage": self.ctx.stage, **labels}
        return next((v for n, found, v in metrics.snapshot() if n == f"flowinfer:{name}" and found == wanted), 0.0)

    @property
    def placements(self) -> float:
        return self.sample("expert_placements_total")


def test_the_first_placement_comes_after_a_quarter() -> None:
    decoding = Decoding("first", workers=4, rebalance=400)
    decoding.run(1000)
    assert decoding.placed_at == [100, 500, 900]


def test_it_plans_nothing_unless_told() -> None:
    assert Experts().rebalance == 0
    decoding = Decoding("off", workers=4)
    decoding.run(500)
    assert decoding.planner.placement is None


def test_one_worker_has_all_experts() -> None:
    decoding = Decoding("alone", rebalance=40)
    decoding.run(100)
    assert decoding.planner.placement is None and not decoding.placed_at


def test_by_default_those_who_decode_in_the_graph_share(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding("shared", rebalance=40)
    monkeypatch.setattr(decoding.ctx, "instances", lambda kind: ["decode.1", "decode.2", "decode.3"])
    decoding.run(10)
    assert decoding.planner.placement is not None and decoding.planner.placement.workers == 4


def test_metrics_tell_what_it_would_gain_on_the_steps_that_followed() -> None:
    decoding = Decoding("told", workers=4, rebalance=4 * STEPS)
    decoding.run(3 * STEPS)
    in_order = decoding.sample("expert_worker_peak_ratio", placement="in order")
    assert in_order == pytest.approx(10 / 4)
    assert 1 <= decoding.sample("expert_worker_peak_ratio", placement="planned") < 1.5
    moved = decoding.sample("expert_moves_total")
    assert moved > 0
    decoding.run(4 * STEPS)  # the same load: placed again, and nothing moves
    assert decoding.placed_at == [STEPS, 5 * STEPS] and decoding.sample("expert_moves_total") == moved
    decoding.run(4 * STEPS, hot=5)
    assert decoding.sample("expert_moves_total") > moved


def test_a_change_of_settings_counts_from_there() -> None:
    decoding = Decoding("changed", workers=4, rebalance=400)
    decoding.run(150)
    decoding.planner.reconfigure(Experts(workers=2, rebalance=40))
    decoding.run(20)
    assert decoding.placed_at == [100, 160]
    assert decoding.planner.placement is not None and decoding.planner.placement.workers == 2


def test_a_plan_that_breaks_fails_no_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.stages.moe_decode.experts.place", lambda *args: 1 / 0)
    decoding = Decoding("broken", workers=4, rebalance=40)
    decoding.run(20)
    assert "placement of experts" in caplog.text and not decoding.ctx.failed


@pytest.mark.parametrize(("written", "slots"), [("1 per worker", 20), ("2 per worker", 24), (0, 16), (5, 24), (4, 20)])
def test_replicas_as_people_write_them(written: object, slots: int) -> None:
    assert Experts.model_validate({"replicas": written}).slots(16, 4) == slots


@pytest.mark.parametrize("written", ["one per worker", "1 per gpu", -1])
def test_replicas_that_say_nothing_are_refused(written: object) -> None:
    with pytest.raises(ValidationError):
        Experts.model_validate({"replicas": written})


def test_the_setting_survives_the_way_to_a_worker() -> None:
    written = {"experts": {"replicas": "1 per worker", "rebalance": 3000}}
    config = MoeDecode.Config.model_validate(written)
    again = MoeDecode.Config.model_validate(config.model_dump(mode="json"))
    assert again == config and again.experts.rebalance == 3000


def test_other_workers_than_before_begin_anew() -> None:
    loads = np.ones((10, 2, 8), np.int32)
    four = look(loads, Experts(), 4, None, due=False)
    assert four.is_new and four.placement.workers == 4
    assert look(loads, Experts(), 2, four.placement, due=False).placement.workers == 2
    same = look(loads, Experts(), 4, four.placement, due=False)
    assert not same.is_new and same.placement is four.placement


def test_a_dense_model_has_nothing_to_place(tmp_path: Path) -> None:
    dense = {"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 16, "intermediate_size": 32}
    dense |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    found = misfit(str(tmp_path))
    assert found is not None and "has none" in found[0]
    assert misfit("flowinfer-mini") is None and misfit("no/such") is None
    fits = [MoeDecode.Config.model_validate({"experts": {"rebalance": n}}).contract().fits for n in (0, 9)]
    assert not fits[0] and fits[1][0].setting == "experts"
