"""Decode one step ahead of the host, on a CPU: the graphs' state by slot is the real one, replays are plain calls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_loop import DEVICE, Service, prompt, save_random_llama
from drafters import KINDS, save_random_head

from flowinfer.engine.batch import Batch
from flowinfer.engine.decode_graphs import DecodeGraphs, Flight, batch_sizes
from flowinfer.engine.draft_plan import DraftPlan
from flowinfer.engine.engine import Engine
from flowinfer.engine.sampling import needs_no_host
from flowinfer.engine.step import Features, StepInput
from flowinfer.engine.verify_graphs import VerifyGraphs
from flowinfer.kernels.draw import advance_drawn_reference
from flowinfer.kernels.greedy import advance_greedy_reference
from flowinfer.kernels.ngram import look_up_reference
from flowinfer.kernels.verify import Rows, advance_verified_reference, spread_rows_reference
from flowinfer.message import Prompt
from flowinfer.stages.spec_verify import stage

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="test_decode_loop.py does this on a GPU, with its graphs")
VOCAB, CONTEXT = 96, 512


class Done:
    """A step that has ended, and counts that nobody looks at it too early."""

    def __init__(self, owner: EagerGraphs) -> None:
        self.owner = owner
        owner.num_ahead += 1
        owner.most_ahead = max(owner.most_ahead, owner.num_ahead)

    def synchronize(self) -> None:
        self.owner.num_ahead -= 1


class Replay:
    def __init__(self, run: Any) -> None:
        self.replay = run


class EagerVerify(VerifyGraphs):
    """As EagerGraphs, of steps with drafts: kernels by their references, the model's rows flat."""

    _spread = staticmethod(spread_rows_reference)
    _advance = staticmethod(advance_verified_reference)

    def _make_scratch(self, sequences: int, rows: int) -> None:
        """References need none."""

    def _model(self, slots: Any, rows: Rows, experts: Any, features: Features | None) -> torch.Tensor:
        real = (rows.ids >= 0).nonzero().flatten()
        live = (rows.counts > 0).nonzero().flatten()
        logits = self._logits[: len(rows.ids)].fill_(float("nan"))
        if len(live):
            counts, owners = rows.counts[live], slots[live].long()
            lengths = (self.graphs.lengths[owners] + counts - 1).numpy()
            step = StepInput(
                tokens=rows.tokens[real].long(),
                positions=(rows.lengths[real] - 1).long(),
                query_starts=np.concatenate([[0], counts.cumsum(0).numpy()]).astype(np.int32),
                kv_lens=lengths.astype(np.int32),
                block_tables=self.graphs.tables[owners].numpy()[:, : -(-int(lengths.max()) // 64)],
                logit_rows=torch.arange(len(real)),
                features=features,
            )
            logits[real] = self.graphs.model.forward(step, self.graphs.kv)
        if features is not None:
            for layer in features.layers:
                whole = torch.zeros(len(rows.ids), self._given.shape[1] // len(features.layers))
                whole[real] = features.outputs.get(layer, whole[:0])
                features.outputs[layer] = whole
        return logits

    def _best(self, logits: torch.Tensor, rows: Rows, chosen: torch.Tensor) -> None:
        chosen.copy_(torch.where(rows.ids >= 0, logits.argmax(1), -1))

    def _draw(self, logits: torch.Tensor, rows: Rows, chosen: torch.Tensor) -> None:
        advance_drawn_reference(logits, rows.ids, self._space, rows.lengths, chosen, rows.settings)

    def _look_up(self, slots: Any, history: Any, lengths: Any, ngram: tuple[int, int]) -> None:
        tokens, num = self.drafted.tokens, self.drafted.num
        look_up_reference(slots, history, lengths, tokens, num, ngram_min=ngram[0], ngram_max=ngram[1])


class EagerGraphs(DecodeGraphs):
    """Replays are eager calls over the device's state alone: what the host keeps for itself is never read."""

    num_ahead = most_ahead = 0

    def __init__(self, model: Any, kv: torch.Tensor, batch: Batch) -> None:
        self._start(model, kv, batch)

    def _verifying_by(self, plan: DraftPlan) -> VerifyGraphs:
        assert not self.num_ahead, "nothing is in flight"
        return EagerVerify(self, plan)

    def captured(self, run: Any) -> Any:
        return Replay(run)

    def _step(self, size: int, drawn: bool) -> list[torch.Tensor]:
        rows = (self.slots[:size] >= 0).nonzero().flatten()
        slots = self.slots[rows].long()
        lengths = self.lengths[slots].numpy()
        count = len(slots)
        step = StepInput(
            tokens=self.last[slots].long(),
            positions=torch.from_numpy(lengths.astype(np.int64) - 1),
            query_starts=np.arange(count + 1, dtype=np.int32),
            kv_lens=lengths,
            block_tables=self.tables[slots].numpy()[:, : -(-int(lengths.max()) // 64)],
            logit_rows=torch.arange(count),
        )
        logits = self.model.forward(step, self.kv)
        self._logits[:count] = logits
        if drawn:
            advance_drawn_reference(
                logits, slots.int(), self.last, self.lengths, self._chosen[:count], self.settings
            )  # fmt: skip
        else:
            advance_greedy_reference(logits, slots.int(), self.last, self.lengths, self._chosen[:count])
        return []

    def event(self) -> Any:
        return Done(self)


@pytest.fixture(autouse=True)
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: Engine, batch: Batch) -> EagerGraphs:
        graphs = EagerGraphs(self.model, self.kv, batch)
        graphs.capture()
        return graphs

    monkeypatch.setattr(Engine, "decode_graphs", make)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, VOCAB, CONTEXT)
    save_random_head(folder, folder / "draft.safetensors")
    return folder


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def step_by_step(model: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The answers of a batch that looks at each step before it starts the next one."""
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "decode_graphs", lambda self, batch: None)
        service = Service(model, num_blocks=64)
        service.send(*prompts)
        return service.finish(p.id for p in prompts)


def test_tokens_are_those_of_one_step_at_a_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(f"r{n}", some_tokens(n, n), max_tokens=20 + 3 * n) for n in (1, 2, 63, 64, 65, 9, 17, 30, 5, 12)]
    service = Service(model, num_blocks=64)
    service.send(*prompts)
    tokens = service.finish(p.id for p in prompts)
    assert tokens == step_by_step(model, prompts, monkeypatch)
    assert service.decode.overlap.graphs.most_ahead == 2
    assert service.pool.num_free == 64
    assert all(len(tokens[p.id]) == p.sampling.max_tokens for p in prompts)


def test_ends_of_text_are_seen_a_step_late_and_change_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prompt("first", some_tokens(5, 30), max_tokens=60)
    stop = step_by_step(model, [first], monkeypatch)["first"][20]
    prompts = [first, *(prompt(f"r{n}", some_tokens(n, 30), max_tokens=60, stop_token_ids=[stop]) for n in (5, 6, 7))]
    service = Service(model, num_blocks=64)
    service.send(*prompts)
    tokens = service.finish(p.id for p in prompts)
    assert tokens == step_by_step(model, prompts, monkeypatch)
    assert tokens["r5"][-1] == stop and len(tokens["r5"]) <= 21
    assert service.pool.num_free == 64


def test_who_needs_the_host_is_decoded_with_it_and_the_rest_goes_on_ahead(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
        {"repetition_penalty": 1.3},
        {"logprobs": 1},
        {},
    ]
    prompts = [
        prompt(f"r{n}", some_tokens(n, 20), max_tokens=15 + 30 * (n % 2), **more) for n, more in enumerate(settings)
    ]
    service = Service(model, num_blocks=64)
    for one in prompts:
        service.send(one)
        service.turn(4)
    assert service.finish(p.id for p in prompts) == step_by_step(model, prompts, monkeypatch)


@pytest.mark.parametrize("draft", ["suffix", "head"])
def test_drafts_that_come_and_go_change_no_token(model: Path, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in flight land before the first draft is verified, and start again behind the last."""
    monkeypatch.setattr(stage, "is_quick", lambda config: True)
    prompts = [prompt(f"r{n}", some_tokens(n, 20 + n), max_tokens=90, temperature=0.4 * n, seed=n) for n in range(4)]
    service = Service(model, num_blocks=64)
    verify: Any = service.group.by_name["verify"].stage
    service.send(*prompts)
    service.turn(12)
    graphs = service.decode.overlap.graphs
    assert graphs.most_ahead == 2
    verify.reconfigure(verify.Config(draft=draft, schedule="fixed"))
    service.turn(12)
    assert not service.decode.overlap.flights
    verify.reconfigure(verify.Config(draft="none"))
    service.turn(12)
    assert service.decode.overlap.flights
    assert service.finish(p.id for p in prompts) == step_by_step(model, prompts, monkeypatch)
    assert all(service.client.ended[p.id].drafted_tokens > 0 for p in prompts) or draft == "suffix"


@pytest.mark.parametrize("schedule", ["confidence", "learned"])
@pytest.mark.parametrize("draft", ["suffix", "head"])
def test_steps_run_ahead_while_drafting_does_not_pay(
    model: Path, draft: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is untrained and the texts don't repeat; now and then a look is taken all the same."""
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path))
    prompts = [prompt(f"r{n}", some_tokens(n, 20 + n), max_tokens=90, temperature=1.0, seed=n) for n in range(4)]
    verify = {"draft": draft, "schedule": schedule, "row_cost": 4.0}
    service = Service(model, num_blocks=64, verify=verify)
    looks: list[int] = []
    drafting: Any = service.group.by_name["verify"].stage.drafting
    guess = drafting.drafter.guess
    monkeypatch.setattr(drafting.drafter, "guess", lambda *args: looks.append(1) or guess(*args))
    if schedule == "confidence":
        for _ in range(9):  # drafting takes as long as ten steps
            drafting.schedule.drafted(4, 1.0)
            drafting.schedule.timed(4, 0.1, 0.0, plain=True)
        monkeypatch.setattr(drafting.schedule, "drafted", lambda *_: None)
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == step_by_step(model, prompts, monkeypatch)
    graphs = service.decode.overlap.graphs
    assert graphs.most_ahead == 2
    assert 1 < len(looks) < service.decode.num_steps / 2


def test_a_head_that_looks_now_and_then_has_read_the_last_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences that need the host and of others; a look without it would say nothing of the head."""
    prompts = [
        prompt(f"r{n}", some_tokens(n, 20 + n), max_tokens=60, frequency_penalty=0.1 * n, temperature=1.0, seed=n)
        for n in range(3)
    ]
    service = Service(model, num_blocks=64, verify={"draft": "head", "row_cost": 4.0})
    drafter: Any = service.group.by_name["verify"].stage.drafting.drafter
    guess, looks = drafter.guess, []

    def checked(slots: Any, num_tokens: Any, choose: Any) -> Any:
        looks.append((drafter._state._newest_at[torch.from_numpy(slots).long()].numpy() == num_tokens - 2).all())
        return guess(slots, num_tokens, choose)

    monkeypatch.setattr(drafter, "guess", checked)
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == step_by_step(model, prompts, monkeypatch)
    assert len(looks) > 3 and all(looks)


def test_running_out_of_blocks_preempts_and_changes_no_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(f"r{n}", some_tokens(n, 40 + n), max_tokens=120) for n in range(6)]
    service = Service(model, num_blocks=8)
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == step_by_step(model, prompts, monkeypatch)
    assert service.decode.num_preemptions > 0
    assert service.pool.num_free == 8


def test_a_sequence_that_outgrows_the_memory_fails_and_frees_it(model: Path) -> None:
    service = Service(model, num_blocks=4)
    service.send(prompt("grows", some_tokens(1, 100), max_tokens=400))
    service.finish(["grows"])
    assert service.client.ended["grows"].code == "kv_exhausted"
    service.turn(2)
    assert service.pool.num_free == 4


def known_answers(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]], wrong: float) -> None:
    """Steps draft what each request will say, with a wrong token now and then, and sometimes nothing."""
    random_ = np.random.default_rng(0)

    def look_up(self: EagerVerify, slots: Any, history: Any, lengths: Any, ngram: tuple[int, int]) -> None:
        batch, drafts = self.graphs.batch, self.plan.num_drafts
        for slot in [slot for slot in slots.tolist() if slot >= 0]:
            length = int(lengths[slot])
            prompt, answer = batch.prompts[slot], answers.get(batch.ids[slot] or "", [])
            if prompt is not None:  # the end of its row is all that the next draft hangs on: the rest must be right
                so_far = [*prompt.tokens.tolist(), *answer]
                assert history[slot, :length].tolist() == so_far[:length] or length > len(so_far)
                known = np.resize(np.array([*so_far[length : length + drafts], 5], np.int32), drafts)
                known[random_.random(drafts) < wrong] += 1
                self.drafted.tokens[slot] = torch.from_numpy(known % VOCAB)
            self.drafted.num[slot] = drafts if random_.random() < 0.9 else 0

    monkeypatch.setattr(EagerVerify, "_look_up", look_up)


WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {}, {"temperature": 1.2, "top_k": 12, "top_p": 0.9}]


@pytest.mark.parametrize(("schedule", "wrong"), [("fixed", 0.0), ("fixed", 0.4), ("confidence", 0.2)])
def test_drafts_made_by_the_steps_themselves_change_no_token_and_save_steps(
    model: Path, schedule: str, wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ahead of the host all the while; lengths end inside drafts, blocks too."""
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path))
    prompts = [prompt(f"r{n}", some_tokens(n, 55 + 4 * n), max_tokens=50 + n, **WAYS[n % 4]) for n in range(7)]
    answers = step_by_step(model, prompts, monkeypatch)
    known_answers(monkeypatch, answers, wrong)
    service = Service(model, num_blocks=64, verify={"draft": "ngram", "tokens": 5, "schedule": schedule})
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == answers
    ends = [service.client.ended[p.id] for p in prompts]
    drafted, accepted = (sum(getattr(end, name) for end in ends) for name in ("drafted_tokens", "accepted_tokens"))
    assert service.decode.overlap.graphs.most_ahead == 2
    assert accepted > 0.9 * drafted > 100 if not wrong else 0.1 * drafted < accepted < 0.9 * drafted
    assert service.decode.num_steps < (25 if not wrong else 45)
    assert service.pool.num_free == 64 and not service.decode.engine.held


def test_look_ups_of_the_steps_are_those_of_the_host(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that repeat; one that needs the host comes and goes, and settings change, while steps are in flight."""
    prompts = [prompt(f"r{n}", some_tokens(n, 9) * 5, max_tokens=70, **WAYS[n % 4]) for n in range(5)]
    late = prompt("late", some_tokens(9, 5) * 4, max_tokens=12, repetition_penalty=1.1)
    service = Service(model, num_blocks=64, verify={"draft": "ngram", "tokens": 4, "schedule": "fixed"})
    verify: Any = service.group.by_name["verify"].stage
    service.send(*prompts)
    service.turn(9)
    service.send(late)
    service.turn(9)
    for settings in ({"draft": "ngram", "tokens": 2}, {"draft": "none"}, {"draft": "ngram", "tokens": 6}):
        verify.reconfigure(verify.Config(schedule="fixed", **settings))
        service.turn(7)
    ids = [p.id for p in (*prompts, late)]
    assert service.finish(ids) == step_by_step(model, [*prompts, late], monkeypatch)
    assert sum(service.client.ended[p.id].drafted_tokens for p in prompts) > 20


@pytest.mark.parametrize("draft", ["suffix", "head"])
def test_drafts_of_the_host_are_verified_by_captured_steps(
    model: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is an eager one, whoever chooses the tokens: none of the prompts needs more rows than are captured."""
    prompts = [prompt(f"r{n}", some_tokens(n, 9) * 4, max_tokens=40, **KINDS[n]) for n in range(len(KINDS))]
    plain = step_by_step(model, prompts, monkeypatch)
    for chosen in (prompts, [p for p in prompts if needs_no_host(p.sampling)]):
        service = Service(model, num_blocks=64, verify={"draft": draft, "tokens": 5, "schedule": "fixed"})
        eager: list[Any] = []
        monkeypatch.setattr(service.decode, "_forward", lambda *rows, ran=eager: ran.append(rows))
        service.send(*chosen)
        assert service.finish(p.id for p in chosen) == {p.id: plain[p.id] for p in chosen}
        assert not eager
        assert sum(service.client.ended[p.id].drafted_tokens for p in chosen) > 5


@pytest.mark.parametrize("seed", range(2))
def test_cancels_and_preemptions_amid_drafts_leave_every_block_free_and_every_answer_right(
    model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    prompts = [prompt(f"r{n}", some_tokens(n, 20 + 9 * n), max_tokens=rng.randrange(1, 90)) for n in range(12)]
    answers = step_by_step(model, prompts, monkeypatch)
    known_answers(monkeypatch, answers, 0.2)
    service = Service(model, num_blocks=9, verify={"draft": "ngram", "tokens": 8, "schedule": "fixed"})
    victims = rng.sample([p.id for p in prompts], 4)
    for one in prompts:
        service.send(one)
        service.turn(rng.randrange(0, 9))
        if victims and rng.random() < 0.5:
            service.cancel(victims.pop())
    for id in victims:
        service.turn(rng.randrange(0, 9))
        service.cancel(id)
    tokens = service.finish(p.id for p in prompts)
    survivors = [p for p in prompts if service.client.ended[p.id] != "cancelled"]
    assert {p.id: tokens[p.id] for p in survivors} == {p.id: answers[p.id] for p in survivors}
    assert service.pool.num_free == 9
    assert not service.decode.engine.held and not service.decode.overlap.flights
    again = [prompt(f"again {p.id}", [*p.tokens.tolist(), *answers[p.id]], max_tokens=5) for p in survivors]
    service.send(*again)  # what was cached amid drafts is what these tokens give
    assert service.finish(p.id for p in again) == step_by_step(model, again, monkeypatch)


@pytest.mark.parametrize("seed", range(3))
def test_random_cancels_leave_every_block_free_and_every_answer_right(
    model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    prompts = [
        prompt(
            f"r{n}",
            some_tokens(n % 4, rng.randrange(1, 150)),
            max_tokens=rng.randrange(1, 90),
            temperature=rng.choice([0.0, 0.0, 0.0, 0.8]),
        )
        for n in range(20)
    ]
    service = Service(model, num_blocks=9)
    victims = rng.sample([p.id for p in prompts], 8)
    for one in prompts:
        service.send(one)
        service.turn(rng.randrange(0, 12))
        if victims and rng.random() < 0.5:
            service.cancel(victims.pop())
    for id in victims:
        service.turn(rng.randrange(0, 12))
        service.cancel(id)
    tokens = service.finish(p.id for p in prompts)
    survivors = [p for p in prompts if service.client.ended[p.id] != "cancelled"]
    assert survivors
    assert {p.id: tokens[p.id] for p in survivors} == step_by_step(model, survivors, monkeypatch)
    assert service.pool.num_free == 9
    assert not service.decode.engine.held and not service.decode.overlap.flights


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 512])
def test_graph_sizes_rise_to_the_largest_batch(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1


def test_a_flight_gives_the_tokens_of_its_rows() -> None:
    flight = Flight(
        np.array([4, 2], np.int32),
        np.array([1, 1]),
        torch.tensor([7, -1, 9]).int(),
        Done(EagerGraphs.__new__(EagerGraphs)),
    )
    assert flight.tokens().tolist() == [7, -1]
