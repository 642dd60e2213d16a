"""spec-verify against a toy model: a table of logits by the last two tokens, so that any run can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flowinfer.engine.batch import Batch
from flowinfer.engine.sampling import Sampler
from flowinfer.errors import RequestError, StageError
from flowinfer.message import Ended, Ids, KVHandle, Logits, Proposal, Sampling, Sequence, Tokens
from flowinfer.observe import metrics
from flowinfer.stage import ports
from flowinfer.stages.spec_verify import stage
from flowinfer.stages.spec_verify.count import SpecCounters
from flowinfer.stages.spec_verify.drafts import Choose, Drafter, Guesses, Ran
from flowinfer.stages.spec_verify.stage import SpecVerify

torch.set_num_threads(1)
VOCAB, EOS = 32, 31


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def sequence(name: str, tokens: Ids, **sampling: Any) -> Sequence:
    kv = KVHandle(
        layout="toy", owner="prefill.0", generation=0, blocks=ids(), num_tokens=len(tokens) - 1, cached_tokens=1
    )
    return Sequence(
        id=name, tokens=tokens, sampling=Sampling(**{"max_tokens": 12, "temperature": 0.0} | sampling), kv=kv
    )


@dataclass
class Output:
    """What a client would see of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    opened: list[Any] = field(default_factory=list)
    finish: Any = None


class Loop:
    """moe-decode's side of the loop over the toy table, [VOCAB, VOCAB, VOCAB] logits by the last two tokens."""

    def __init__(self, table: torch.Tensor, *, max_tokens: int = 64, max_slots: int = 8, **config: Any) -> None:
        self.table, self.step = table, 0
        self.freed: list[int] = []
        self.failed: dict[str, RequestError] = {}
        self.batch = Batch(
            max_slots=max_slots,
            max_tokens=max_tokens,
            max_drafts=8,
            block_tokens=64,
            eos_token_ids=(EOS,),
            vocab_size=VOCAB,
            on_finish=self.freed.append,
        )
        self.ctx = SimpleNamespace(stage="verify", shared=lambda key, make: self.batch, fail=self.failed.__setitem__)
        self.stage = SpecVerify(SpecVerify.Config(**config), self.ctx)
        self.stage.open()
        self.proposal: Proposal | None = None
        self.proposals: list[Proposal] = []
        self.outputs: dict[str, Output] = {}

    def add(self, item: Sequence, history: Ids | None = None) -> int:
        return self.batch.add(item, item.tokens if history is None else history, ids())

    def run(self, *items: Sequence, steps: int = 200) -> dict[str, Output]:
        for item in items:
            self.add(item)
        while len(self.batch) and steps:
            self.turn()
            steps -= 1
        return self.outputs

    def turn(self) -> None:
        self.proposal = self.give(self.logits())

    def give(self, logits: Logits) -> Proposal | None:
        proposal = None
        for message in self.stage.step([logits]):
            if isinstance(message, Proposal):
                proposal = message
                self.proposals.append(message)
            else:
                self.take(message)
        return proposal

    def take(self, message: Tokens) -> None:
        assert len(message.tokens) == message.counts.sum() and message.tokens.dtype == np.int32
        for opening in message.opened:
            self.outputs.setdefault(opening.id, Output()).opened.append(opening)
        runs = np.split(message.tokens, np.cumsum(message.counts)[:-1])
        for i, (name, run) in enumerate(zip(message.ids, runs, strict=True)):
            output = self.outputs.setdefault(name, Output())
            output.tokens += run.tolist()
            output.logprobs += message.logprobs.get(i, [])
            output.finish = message.finished.get(i)

    def rows(self) -> list[tuple[int, list[int]]]:
        """The slots of a step with the tokens that each is to run."""
        rows: list[tuple[int, list[int]]] = []
        if self.proposal is not None:
            runs = np.split(self.proposal.tokens, np.cumsum(self.proposal.counts)[:-1])
            rows = [
                (s, r.tolist()) for s, r in zip(self.proposal.slots.tolist(), runs, strict=True) if self.batch.ids[s]
            ]
        proposed = {slot for slot, _ in rows}
        joined = [slot for slot in self.batch.joined if slot not in proposed]
        return rows + [(slot, [int(self.batch.history(slot)[-1])]) for slot in joined]

    def logits(self) -> Logits:
        rows, logits = self.rows(), []
        for slot, run in rows:
            history = self.batch.history(slot).tolist()
            assert run[0] == history[-1], "a proposal begins with the last token"
            text = history + run[1:]
            logits += [self.table[text[-len(run) + j - 1], text[-len(run) + j]] for j in range(len(run))]
        starts = np.cumsum([0, *[len(run) for _, run in rows]]).astype(np.int32)
        self.step += 1
        return Logits(step=self.step, slots=ids(*[s for s, _ in rows]), starts=starts, logits=torch.stack(logits))


class Drawn:
    """Drafts by a toy table of its own, token after token, with the settings and the noise of each request."""

    block, needs_features, needs_host, calibrated = 4, (), True, False

    def __init__(self, table: torch.Tensor, batch: Batch) -> None:
        self.table, self.batch = table, batch
        self.ran: list[Ran] = []

    def join(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def leave(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def observe(self, ran: Ran) -> None:
        self.ran.append(ran)

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose) -> Guesses:
        before, last = (torch.from_numpy(self.batch.tokens[slots, num_tokens - i]).long() for i in (2, 1))
        drafts, sure = [], []
        for place in range(self.block):
            logits = self.table[before, last]
            before, last = last, choose(place, logits)
            drafts.append(last.numpy())
            sure.append(logits.softmax(1).amax(1).numpy())
        return Guesses(np.ones(slots.size, bool), np.stack(drafts, 1).astype(np.int32), np.stack(sure, 1))


def draft_by(table: torch.Tensor, patch: pytest.MonkeyPatch) -> None:
    """From now on `draft: head` drafts by this table."""
    others = stage.make_drafter

    def make(config: SpecVerify.Config, batch: Batch) -> Drafter | None:
        return Drawn(table, batch) if config.draft == "head" else others(config, batch)

    patch.setattr(stage, "make_drafter", make)


def toy_table(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def cycle(period: int) -> torch.Tensor:
    """A model that counts 0 .. period-1 round and round, whatever came before."""
    table = torch.zeros(VOCAB, VOCAB, VOCAB)
    for token in range(VOCAB):
        table[:, token, (token + 1) % period] = 9.0
    return table


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"temperature": 1.3, "seed": 5},
    "cool": {"temperature": 0.6, "seed": -1},
    "filtered": {"temperature": 1.0, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4},
    "greedy penalized": {"frequency_penalty": 0.7},
    "biased": {"temperature": 1.0, "logit_bias": {3: 2.5, 4: -100.0, 999: 1.0}},
    "long": {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": (2, 9)},
}


def requests() -> list[Sequence]:
    prompt = ids(1, 2, 3, 4, 1, 2, 3, 4, 1, 2)
    return [sequence(name, prompt, max_tokens=40, **kwargs) for name, kwargs in SETTINGS.items()]


def test_ports_are_those_of_the_decode_loop() -> None:
    inputs, outputs = ports(SpecVerify)
    assert [port.message for port in inputs] == [Logits]
    assert {port.message for port in outputs} == {Tokens, Proposal}
    assert SpecVerify.kind == "spec-verify"


def test_greedy_follows_the_table() -> None:
    table = toy_table()
    output = Loop(table, draft="none").run(sequence("a", ids(5, 6), max_tokens=6, ignore_eos=True))["a"]
    text = [5, 6]
    while len(text) < 8:
        text.append(int(table[text[-2], text[-1]].argmax()))
    assert output.tokens == text[2:]


def test_opening_comes_once_and_finish_last() -> None:
    loop = Loop(cycle(5), draft="none")
    output = loop.run(sequence("a", ids(0, 1, 2), max_tokens=7))["a"]
    (opening,) = output.opened
    assert (opening.id, opening.prompt_tokens, opening.cached_tokens) == ("a", 3, 1)
    assert output.finish.reason == "length"
    assert (output.finish.prompt_tokens, output.finish.completion_tokens, output.finish.cached_tokens) == (3, 7, 1)
    assert loop.freed and not len(loop.batch)


def test_speculation_changes_no_token() -> None:
    plain = Loop(toy_table(scale=4.0), draft="none").run(*requests())
    drafting = Loop(toy_table(scale=4.0), draft="ngram", ngram_min=1, row_cost=0.0).run(*requests())
    assert {name: out.tokens for name, out in plain.items()} == {name: out.tokens for name, out in drafting.items()}
    assert sum(out.finish.drafted_tokens for out in drafting.values()) > 20, "nothing was drafted, so nothing tested"
    assert sum(out.finish.accepted_tokens for out in drafting.values()) > 0


@pytest.mark.parametrize("error", [0.0, 0.5, 2.0])
def test_drafts_that_are_drawn_change_no_token(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that knows the model is always right, penalties or not; one that errs costs steps and nothing else."""
    table = toy_table(scale=2.0)
    draft_by(table + error * toy_table(seed=1, scale=1.0), monkeypatch)
    plain = Loop(table, draft="none").run(*requests())
    drafting = Loop(table, draft="head", schedule="fixed").run(*requests())
    assert {name: out.tokens for name, out in plain.items()} == {name: out.tokens for name, out in drafting.items()}
    drafted, accepted = (
        sum(getattr(out.finish, what) for out in drafting.values()) for what in ("drafted_tokens", "accepted_tokens")
    )
    assert drafted > 100
    lost = 4 * len(SETTINGS)  # what was drafted behind the end of each
    assert drafted - accepted <= lost if error == 0 else 0.05 < accepted / drafted < 0.8


def test_a_drafter_is_told_what_held_and_what_the_layers_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of the history but the last once, in order, with the features of its own row."""
    table = toy_table(scale=2.0)
    draft_by(table + 0.5 * toy_table(seed=1, scale=1.0), monkeypatch)
    loop = Loop(table, draft="head", schedule="fixed")
    loop.add(sequence("a", ids(5, 6, 7), max_tokens=30, ignore_eos=True))
    for _ in range(6):
        logits = loop.logits()
        logits.features = torch.tensor([token for _, run in loop.rows() for token in run]).unsqueeze(1)
        loop.proposal = loop.give(logits)
    drafter = loop.stage.drafting.drafter
    assert isinstance(drafter, Drawn)
    history = loop.batch.history(0)
    positions = np.concatenate([ran.positions for ran in drafter.ran])
    assert positions.tolist() == list(range(2, len(history) - 1))
    assert np.concatenate([ran.tokens for ran in drafter.ran]).tolist() == history[2:-1].tolist()
    for ran in drafter.ran:
        assert ran.features is not None and ran.features[:, 0].tolist() == ran.tokens.tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(name: str) -> None:
    table = toy_table(scale=4.0)
    together = Loop(table).run(*requests())[name].tokens
    assert Loop(table).run(*[r for r in requests() if r.id == name])[name].tokens == together


@pytest.mark.parametrize("name", SETTINGS)
def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(name: str) -> None:
    table = toy_table(scale=4.0)
    (request,) = [r for r in requests() if r.id == name]
    whole = Loop(table).run(request)[name]
    loop = Loop(table)
    slot = loop.add(request)
    for _ in range(3):
        loop.turn()
    assert len(loop.batch), "ended before it could be preempted"
    history = loop.batch.history(slot)
    loop.batch.remove(slot)
    loop.proposal = None
    loop.run(sequence("other", ids(1, 2), max_tokens=3))  # takes the slot meanwhile
    loop.add(request, history)
    resumed = loop.run()[name]
    assert resumed.tokens == whole.tokens
    assert len(resumed.opened) == 1
    assert resumed.finish.completion_tokens == whole.finish.completion_tokens
    assert resumed.finish.cached_tokens == whole.finish.cached_tokens


def test_drafts_save_steps_on_repetitive_text() -> None:
    item = sequence("a", ids(0, 1, 2, 3, 4, 0, 1, 2), max_tokens=40)
    loop = Loop(cycle(5), draft="ngram")
    finish = loop.run(item)["a"].finish
    assert loop.step <= 14
    assert finish.accepted_tokens == 40 - loop.step
    assert finish.drafted_tokens >= finish.accepted_tokens


def test_a_stop_inside_an_accepted_run_cuts_what_follows() -> None:
    item = sequence("a", ids(0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0), max_tokens=40, stop_token_ids=(3,))
    loop = Loop(cycle(5), draft="ngram", row_cost=0.0)
    output = loop.run(item)["a"]
    assert output.tokens == [1, 2, 3]
    assert (output.finish.reason, output.finish.stop, output.finish.completion_tokens) == ("stop", 3, 3)
    assert output.finish.accepted_tokens <= 3


@pytest.mark.parametrize(("ignore", "expected"), [(False, [30, EOS]), (True, [30, EOS, 0, 1, 2, 3])])
def test_end_of_text_ends_unless_ignored(ignore: bool, expected: list[int]) -> None:
    output = Loop(cycle(VOCAB)).run(sequence("a", ids(28, 29), max_tokens=6, ignore_eos=ignore))["a"]
    assert output.tokens == expected


def test_min_tokens_puts_off_the_end() -> None:
    output = Loop(cycle(VOCAB)).run(sequence("a", ids(28, 29), max_tokens=9, min_tokens=4, logit_bias={EOS: 50.0}))["a"]
    assert EOS not in output.tokens[:4]
    assert output.tokens[4:] == [EOS]


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_is_exact(draft: str, max_tokens: int) -> None:
    loop = Loop(cycle(3), draft=draft, row_cost=0.0)
    output = loop.run(sequence("a", ids(0, 1, 2, 0, 1, 2), max_tokens=max_tokens))["a"]
    assert len(output.tokens) == max_tokens and output.finish.reason == "length"


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_the_end_of_the_context_ends_a_sequence(draft: str) -> None:
    loop = Loop(cycle(3), max_tokens=13, draft=draft, row_cost=0.0)
    output = loop.run(sequence("a", ids(0, 1, 2, 0, 1, 2), max_tokens=100))["a"]
    assert len(output.tokens) == 7 and output.finish.reason == "length"


def test_no_draft_runs_past_the_batch() -> None:
    loop = Loop(cycle(3), max_tokens=20, draft="ngram", tokens=8, row_cost=0.0)
    loop.add(sequence("a", ids(0, 1, 2, 0, 1, 2), max_tokens=100))
    while len(loop.batch):
        loop.turn()
        if loop.proposal is not None:
            drafts = loop.proposal.counts - 1
            assert (loop.batch.num_tokens[loop.proposal.slots] + drafts <= 20).all() and (drafts <= 8).all()


def test_rows_of_a_cancelled_sequence_are_ignored() -> None:
    loop = Loop(cycle(5))
    gone = loop.add(sequence("gone", ids(0, 1)))
    loop.add(sequence("stays", ids(0, 1), max_tokens=5))
    loop.turn()
    late = loop.logits()
    loop.batch.finish(gone)
    loop.stage.cancel(["gone", "never seen"])
    loop.proposal = loop.give(late)
    assert loop.proposal is not None and gone not in loop.proposal.slots
    outputs = loop.run()
    assert outputs["stays"].tokens == [2, 3, 4, 0, 1] and outputs["gone"].tokens == [2]


def test_rows_of_a_sequence_that_lost_its_slot_are_ignored() -> None:
    loop = Loop(cycle(5))
    slot = loop.add(sequence("a", ids(0, 1)))
    loop.turn()
    late = loop.logits()
    loop.batch.remove(slot)
    assert loop.give(late) is None
    assert loop.outputs["a"].tokens == [2]


def test_a_sequence_that_has_not_run_yet_stays_among_the_joined() -> None:
    loop = Loop(cycle(5))
    loop.add(sequence("a", ids(0, 1)))
    logits = loop.logits()
    waiting = loop.add(sequence("b", ids(0, 1)))
    loop.give(logits)
    assert loop.batch.joined == [waiting]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_request_alone(temperature: float) -> None:
    table = cycle(5)
    table[7, 8] = torch.nan
    loop = Loop(table)
    outputs = loop.run(sequence("bad", ids(7, 8), temperature=temperature), sequence("good", ids(0, 1), max_tokens=3))
    assert set(loop.failed) == {"bad"} and isinstance(loop.failed["bad"], RequestError)
    assert outputs["good"].tokens == [2, 3, 4] and "bad" not in outputs
    assert not len(loop.batch)


def test_logprobs_are_of_the_raw_logits() -> None:
    table = toy_table()
    item = sequence("a", ids(1, 2, 1, 2, 1), max_tokens=8, temperature=0.5, top_k=3, logprobs=4, frequency_penalty=1.0)
    output = Loop(table, draft="ngram", ngram_min=1, row_cost=0.0).run(item)["a"]
    text = [1, 2, 1, 2, 1]
    assert [entry.token for entry in output.logprobs] == output.tokens
    for entry in output.logprobs:
        expected = table[text[-2], text[-1]].double().log_softmax(0)
        best = expected.topk(4)
        assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-5)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        text.append(entry.token)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 6},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("kwargs", KINDS)
def test_drafted_tokens_have_the_distribution_of_sampled_ones(
    kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of the second and third token over many seeds, drafted against not: independent seeds, so that
    equality token for token can't make the test pass by itself."""
    table = toy_table(scale=1.0)
    table[:, :, 8:] = -torch.inf
    draft_by(table + 0.7 * toy_table(seed=1, scale=1.0), monkeypatch)
    prompt = ids(*range(8), *range(8))
    counts = []
    for draft, first_seed in (("none", 0), ("ngram", 10_000), ("head", 20_000)):
        loop = Loop(table, draft=draft, ngram_min=1, max_slots=64, row_cost=0.0)
        items = [
            sequence(f"{i}", prompt, max_tokens=4, seed=first_seed + i, **kwargs)
            for i in range(900 if draft == "head" else 1500)
        ]
        for start in range(0, len(items), 50):
            loop.run(*items[start : start + 50])
        pairs = [output.tokens[1] * 8 + output.tokens[2] for output in loop.outputs.values()]
        counts.append(np.bincount(pairs, minlength=64))
        drafted = sum(output.finish.drafted_tokens for output in loop.outputs.values())
        assert (drafted > 1000) == (draft != "none")
    common = sum(counts) >= 15
    assert stats.chi2_contingency(np.array(counts)[:, common]).pvalue > 1e-3


def test_a_batch_must_be_there() -> None:
    ctx = SimpleNamespace(stage="verify", shared=lambda key, make: make())
    with pytest.raises(StageError, match="no decode batch"):
        SpecVerify(SpecVerify.Config(), ctx).open()


def test_ngram_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="ngram_min"):
        SpecVerify.Config(ngram_min=5, ngram_max=3)


def test_greedy_slots_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of greedy requests never reaches the sampler's loop over rows."""

    def refuse(*_: Any) -> Callable[..., Any]:
        raise AssertionError("greedy rows were edited one by one")

    monkeypatch.setattr(Sampler, "_picky_rows", refuse)
    assert Loop(cycle(5)).run(sequence("a", ids(0, 1), max_tokens=3))["a"].tokens == [2, 3, 4]


def test_counters_count_drafts_by_position() -> None:
    names = ("spec_drafts_total", "spec_draft_tokens_total", "spec_accepted_tokens_total")

    def read() -> dict[tuple[str, str], float]:
        samples = metrics.snapshot()
        return {(name.removeprefix("flowinfer:"), labels.get("position", "")): value for name, labels, value in samples}

    before = read()
    counters = SpecCounters(3)
    counters.count(ids(3, 3, 0, 2), ids(3, 1, 0, 0))
    rise = {key: value - before.get(key, 0) for key, value in read().items()}
    assert [rise[name, ""] for name in names] == [3, 8, 4]
    assert [rise["spec_accepted_per_position_total", str(i)] for i in range(3)] == [2, 1, 1]


def test_confidences_are_counted_against_what_became_of_them() -> None:
    def read(name: str) -> dict[str, float]:
        found = [(labels, value) for full, labels, value in metrics.snapshot() if full == f"flowinfer:{name}"]
        return {labels["confidence"]: value for labels, value in found}

    counters = SpecCounters(3)
    before = [read("spec_confidence_guesses_total"), read("spec_confidence_held_total")]
    confidences = np.array([[0.95, 0.55, 0.11], [1.0, 0.5, 0.1], [0.0, 0.3, 0.3]], np.float32)
    counters.calibrate(confidences, hits=ids(2, 3, 0), trials=ids(3, 3, 1))
    after = [read("spec_confidence_guesses_total"), read("spec_confidence_held_total")]
    guesses, held = (
        {name: now[name] - was.get(name, 0) for name in now if now[name] != was.get(name, 0)}
        for was, now in zip(before, after, strict=True)
    )
    assert guesses == {"0.9": 2, "0.5": 2, "0.1": 2, "0.0": 1}
    assert held == {"0.9": 2, "0.5": 2, "0.1": 1}


def test_settings_out_of_all_bounds_harm_nobody() -> None:
    wild = sequence(
        "wild",
        ids(0, 1),
        temperature=1e-30,
        top_k=2**70,
        min_tokens=2**70,
        max_tokens=2**70,
        seed=-(2**70),
        stop_token_ids=(2**40, -7),
        logit_bias={2**40: 1.0, -1: 5.0},
        logprobs=2**40,
    )
    loop = Loop(cycle(5), max_tokens=8)
    outputs = loop.run(wild, sequence("tame", ids(0, 1), max_tokens=3))
    assert outputs["tame"].tokens == [2, 3, 4] and outputs["wild"].tokens == [2, 3, 4, 0, 1, 2]
    assert not loop.failed


def test_nothing_is_kept_of_a_sequence_that_ended_while_preempted() -> None:
    loop = Loop(cycle(5))
    slot = loop.add(sequence("a", ids(0, 1)))
    loop.turn()
    loop.batch.remove(slot)
    loop.proposal = None
    loop.run(sequence("b", ids(0, 1), max_tokens=2))
    assert set(loop.stage.tenants.displaced) == {"a"}
    loop.stage.observe(Ended(ids=["a", "b"]))
    assert not loop.stage.tenants.displaced and not loop.stage.tenants.slot_of


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["none", "ngram", "suffix"]))
def test_any_order_of_joins_preemptions_and_cancels_leaves_each_answer_as_it_is(seed: int, draft: str) -> None:
    random, table = np.random.default_rng(seed), toy_table(scale=4.0)
    loop = Loop(table, draft=draft, max_slots=4, ngram_min=1, row_cost=0.0)
    queue: list[tuple[Sequence, Ids | None]] = [(request, None) for request in requests()]
    cancelled: set[str] = set()
    while queue or len(loop.batch):
        while queue and loop.batch.num_free and random.random() < 0.7:
            loop.add(*queue.pop(0))
        late = loop.logits() if len(loop.batch) else None
        for name, slot in list(loop.batch.slot_of.items()):
            event, prompt = random.random(), loop.batch.prompts[slot]
            if event < 0.05 and prompt is not None:
                queue.append((prompt, loop.batch.history(slot)))
                loop.batch.remove(slot)
            elif event < 0.07:
                loop.batch.finish(slot)
                loop.stage.cancel([name])
                cancelled.add(name)
        if late is not None:
            loop.proposal = loop.give(late)
    for request in requests():
        alone, output = Loop(table, draft="none").run(request)[request.id], loop.outputs.get(request.id, Output())
        if request.id in cancelled:
            assert alone.tokens[: len(output.tokens)] == output.tokens
        else:
            assert output.tokens == alone.tokens and len(output.opened) == 1 and output.finish.reason
    assert not loop.stage.tenants.slot_of and not loop.stage.tenants.displaced
    assert loop.stage.sampler.plain.all() and not loop.stage.num_top
