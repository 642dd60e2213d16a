"""Rows of each expert are counted as the model routes them, by layer and step, prefill and decode apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_loop import Service, prompt

from flowinfer.engine.decode_graphs import BOOKED, ExpertRows, count_rows
from flowinfer.engine.expert_load import ExpertLoad, LoadWindow
from flowinfer.engine.models import load_model
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.models.moe import ExpertFFN

torch.set_num_threads(1)


def test_a_window_keeps_the_newest_steps_in_order() -> None:
    window = LoadWindow(layers=1, experts=2, steps=3)
    for step in range(5):
        window.add(np.array([[step, 1]], np.int32))
    assert window.recent()[:, 0, 0].tolist() == [2, 3, 4]
    assert window.num_steps == 5 and window.num_rows == 15
    assert window.peaks().tolist() == [9 / 6]


def test_steps_booked_together_are_as_booked_one_by_one() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (17, 2, 3)).astype(np.int32)
    one, together = (LoadWindow(layers=2, experts=3, steps=7) for _ in range(2))
    for step in counts:
        one.add(step)
    for start, end in ((0, 5), (5, 12), (12, 17)):
        together.add_all(counts[start:end])
    assert (one.recent() == together.recent()).all() and (one.peaks() == together.peaks()).all()
    assert (one.num_steps, one.num_rows) == (together.num_steps, together.num_rows)


class Arrives:
    """An event of the device that has come once it is told so."""

    def __init__(self) -> None:
        self.come = False

    def query(self) -> bool:
        return self.come

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the rows of experts")


def test_rows_of_experts_are_booked_together_once_they_have_arrived() -> None:
    window = LoadWindow(layers=1, experts=2)
    rows, events = ExpertRows(torch.zeros(1, 2, dtype=torch.int32), window), []

    def event() -> Arrives:
        events.append(Arrives())
        return events[-1]

    def keep(first: int, count: int) -> None:
        for step in range(first, first + count):
            rows.keep(torch.tensor([[step, 1]], dtype=torch.int32), event)

    keep(0, 2 * BOOKED)
    assert window.num_steps == 0 and len(events) == 2
    events[0].come = True
    keep(2 * BOOKED, 1)
    assert window.recent()[:, 0, 0].tolist() == list(range(BOOKED))
    keep(2 * BOOKED + 1, 9 * BOOKED)  # nothing arrives: what finds no room is lost, nothing is written over
    for late in events:
        late.come = True
    keep(0, 5)
    booked = window.recent()[:, 0, 0].tolist()
    assert booked == list(range(4 * BOOKED)), "and none is mixed with another"


def test_a_window_of_few_steps_has_only_those() -> None:
    window = LoadWindow(layers=1, experts=2, steps=3)
    assert window.recent().shape == (0, 1, 2) and window.peaks().tolist() == [0]
    window.add(np.array([[3, 1]], np.int32))
    assert window.recent().tolist() == [[[3, 1]]] and window.peaks().tolist() == [1.5]


def test_phases_are_kept_apart_and_each_step_begins_at_zero() -> None:
    load = ExpertLoad(torch.zeros(2, 3, dtype=torch.int32))
    load.counts_LE[0, 1] += 5
    load.end_step("prefill")
    load.counts_LE[1, 2] += 7
    load.end_step("decode")
    assert load.windows["prefill"].recent().tolist() == [[[0, 5, 0], [0, 0, 0]]]
    assert load.windows["decode"].recent().tolist() == [[[0, 0, 0], [0, 0, 7]]]


def moe(folder: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 8,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts: dict[str, Any] = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    }
    config = Qwen3MoeConfig(**sizes, **experts, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_counts_are_those_of_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.Tensor] = []
    route = ExpertFFN._route

    def watched(self: ExpertFFN, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = route(self, x)
        chosen.append(experts)
        return weights, experts

    monkeypatch.setattr(ExpertFFN, "_route", watched)
    service = Service(moe(tmp_path), num_blocks=8)
    service.send(prompt("a", range(3, 60), max_tokens=4), prompt("b", range(5, 30), max_tokens=4))
    service.finish(["a", "b"])
    load = service.decode.engine.expert_load
    assert load.counts_LE.shape == (2, 6), "the dense layer has no experts"
    counted = np.concatenate([window.recent() for window in load.windows.values()]).sum(0)
    wanted = [torch.cat(chosen[layer::2]).flatten().bincount(minlength=6).tolist() for layer in range(2)]
    assert counted.tolist() == wanted
    prefill, decode = (load.windows[phase] for phase in ("prefill", "decode"))
    assert prefill.num_rows == 2 * 2 * (56 + 24) and decode.num_rows == 2 * 2 * 8


def test_deepseek_v4_counts_and_a_dense_model_doesnt(tmp_path: Path) -> None:
    service = Service(Path("flowinfer-mini"), num_blocks=4)
    service.send(prompt("a", range(20, 60), max_tokens=5))
    service.finish(["a"])
    load = service.decode.engine.expert_load
    assert load.windows["decode"].recent().sum((0, 2)).tolist() == [2 * 5] * 8
    assert load.windows["prefill"].recent().sum((0, 2)).tolist() == [2 * 39] * 8
    from decode_loop import save_random_llama

    save_random_llama(tmp_path, 96, 128)
    model = load_model(tmp_path)
    assert isinstance(model, Model) and model.expert_load_LE is None


def test_padding_of_a_graph_is_nobodys_load() -> None:
    ids = torch.tensor([[[0, 1], [1, 2], [0, 1], [0, 1]], [[2, 0], [2, 1], [2, 0], [2, 0]]], dtype=torch.int32)
    slots = torch.tensor([3, 0, -1, -1], dtype=torch.int32)
    assert count_rows(ids, slots, 3).tolist() == [[1, 2, 1], [1, 1, 2]]


def test_a_service_plans_while_it_decodes_and_answers_the_same() -> None:
    prompts = [prompt(f"r{n}", range(20, 60 + n), max_tokens=30) for n in range(3)]
    tokens = []
    for experts in ({}, {"workers": 4, "rebalance": 40}):
        service = Service(Path("flowinfer-mini"), num_blocks=8, experts=experts)
        service.send(*prompts)
        tokens.append(service.finish([p.id for p in prompts]))
        while service.decode.planner._looking:
            service.turn()
        planned = service.decode.planner.placement
        assert (planned is None) == (not experts)
    assert planned.by_worker.shape == (8, 4, 5) and tokens[0] == tokens[1]
