"""Kernels of steps that verify drafts, under Triton's interpreter or compiled (FLOWINFER_TEST_DEVICE=cuda:0)."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import decode_attention as decode_module
from flowinfer.kernels import ngram
from flowinfer.kernels.decode_attention import DecodeBatch
from flowinfer.kernels.draw import SlotSettings, advance_drawn, draw_scratch
from flowinfer.kernels.greedy import advance_greedy, greedy_scratch
from flowinfer.kernels.ngram import look_up, look_up_reference, lookup_scratch
from flowinfer.kernels.rope import Heads
from flowinfer.kernels.verify import (
    Drafted,
    Rows,
    advance_verified,
    advance_verified_reference,
    read_verdict,
    spread_rows,
    spread_rows_reference,
    verdict_width,
)
from flowinfer.kernels.verify_attention import make_scratch, verify_attention, verify_attention_reference
from flowinfer.stages.spec_verify.drafts import NgramDraft
from flowinfer.stages.spec_verify.policy import count_matches

pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
EPS, PAGE = 1e-5, 16
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [Heads(6, 2, 12), Heads(4, 4, 16), Heads(8, 1, 64), Heads(9, 3, 64)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # each program costs a millisecond here
        monkeypatch.setattr(decode_module, "PROGRAMS", 24)
        monkeypatch.setattr(ngram, "PARTS", 2)
        from flowinfer.kernels.ngram import triton as look_up_module

        monkeypatch.setattr(look_up_module, "PARTS", 2)
        monkeypatch.setattr(look_up_module, "BLOCK", 16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    got, want = got.double().cpu(), want.double().cpu()
    assert got.isfinite().all()
    error = (got - want).norm() / want.norm().clamp(min=1e-9)
    assert error < (2e-5 if dtype is torch.float32 else 2.5e-2), float(error)


def ropes(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(300.0), 0.5 ** torch.arange(head_dim // 2))
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    return cos.to(DEVICE, dtype), sin.to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("heads", "normed", "dtype"),
    [
        case
        if case in ((SHAPES[0], False, torch.float32), (SHAPES[3], True, torch.bfloat16))
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(SHAPES, (False, True), DTYPES)
    ],
)
def test_rows_of_a_sequence_attend_as_steps_one_after_the_other(heads: Heads, normed: bool, dtype: torch.dtype) -> None:
    """Rows that cross a page, first pages, no rows at all; unwritten memory is NaN, and stays what it was."""
    n, k, d = heads
    rows = 5
    lengths, counts, slots = [1, 13, 16, 17, 70, 33], [5, 5, 3, 1, 4, 0, 2], [0, 1, 2, 3, 4, 5, -1]
    most = -(-(max(lengths) + rows) // PAGE)
    tables = torch.from_numpy(np.random.default_rng(3).permutation(most * len(lengths)).astype(np.int32))
    tables = tables.view(len(lengths), most)
    kv = torch.full((most * len(lengths), 3, 2, k, PAGE, d), float("nan"), dtype=dtype)
    for slot, length in enumerate(lengths):
        for t in range(length - 1):
            page = kv[tables[slot, t // PAGE], :, :, :, t % PAGE]
            page.copy_(random(*page.shape, dtype=dtype, seed=31 * slot + t))
    other, kv = kv.double(), kv.to(DEVICE)
    qkv = random(len(slots) * rows, (n + 2 * k) * d, dtype=dtype)
    rope = ropes(dtype, d)
    norms = (random(d, dtype=dtype, seed=4), random(d, dtype=dtype, seed=5)) if normed else None
    host = DecodeBatch(int32(*slots), int32(*lengths), tables)
    want = verify_attention_reference(
        qkv.double().cpu(), other, 1, heads, host, int32(*counts), tuple(x.double().cpu() for x in rope),  # type: ignore[arg-type]
        tuple(x.double().cpu() for x in norms) if norms else None, EPS,  # type: ignore[arg-type]
    )  # fmt: skip
    batch = DecodeBatch(*(tensor.to(DEVICE) for tensor in host))
    scratch = make_scratch(len(slots), rows, heads, kv.device)
    for _ in range(2):  # the second finds the scratch as the first left it
        got = verify_attention(
            qkv, kv, 1, heads, batch, int32(*counts).to(DEVICE), rope, norms, EPS, scratch
        )  # fmt: skip
    assert got.isfinite().all()
    real = (torch.arange(rows) < int32(*counts).unsqueeze(1)).flatten()
    near(got.cpu()[real], want[real], dtype)
    written = ~other.isnan()
    assert torch.equal(~kv.isnan().cpu(), written), "the same memory was written"
    near(kv.cpu()[written], other[written], dtype)


def test_what_verify_attention_cannot_pack_is_refused() -> None:
    heads = Heads(2, 1, 16)
    batch = DecodeBatch(int32(0), int32(1), int32(0).view(1, 1))
    kv = torch.zeros(1, 1, 2, 1, PAGE, 16)
    scratch = make_scratch(1, 2, heads, kv.device)
    for qkv in (torch.zeros(17, 64), torch.zeros(2, 63), torch.zeros(2, 64).bfloat16()):
        with pytest.raises(KernelUnsupported):
            verify_attention(qkv, kv, 0, heads, batch, int32(1), ropes(torch.float32, 16), None, EPS, scratch)


VOCAB, SLOTS, POSITIONS = 50, 6, 40


class State:
    """A batch by slot, the same on both devices."""

    def __init__(self, seed: int, drafts: int, *, warm: bool) -> None:
        rng = np.random.default_rng(seed)

        def some(low: int, high: int, *shape: int) -> Tensor:
            return torch.from_numpy(rng.integers(low, high, shape).astype(np.int32))

        self.last, self.lengths = some(0, VOCAB, SLOTS), some(1, 30, SLOTS)
        limits = self.lengths + some(0, 9, SLOTS)
        self.drafted = Drafted(
            some(0, 2, SLOTS, drafts), some(0, drafts + 1, SLOTS), some(0, drafts + 1, SLOTS), limits
        )
        self.history = some(0, VOCAB, SLOTS, POSITIONS)
        heat = torch.from_numpy(rng.choice([0.0, 0.7, 1.3], SLOTS).astype(np.float32)) * warm
        seeds = torch.from_numpy(rng.integers(0, 2**62, SLOTS))
        self.settings = SlotSettings(heat, some(0, 5, SLOTS), torch.ones(SLOTS), torch.zeros(SLOTS), seeds)
        self.slots = torch.tensor([4, -1, 0, 2, 5], dtype=torch.int32)
        self.to(DEVICE)

    def to(self, device: str) -> None:
        """Every tensor a copy of its own."""
        for name in ("last", "lengths", "history", "slots"):
            setattr(self, name, getattr(self, name).clone().to(device))
        self.drafted = Drafted(*(x.clone().to(device) for x in self.drafted))
        self.settings = SlotSettings(*(x.clone().to(device) for x in self.settings))

    def tensors(self) -> list[Tensor]:
        return [self.last, self.lengths, self.history, *self.drafted]


def rows_equal(got: Rows, want: Rows) -> None:
    real = want.ids >= 0
    assert torch.equal(got.counts.cpu(), want.counts) and torch.equal(got.ids.cpu(), want.ids)
    assert torch.equal(got.tokens.cpu(), want.tokens)
    assert torch.equal(got.lengths.cpu()[real], want.lengths[real])
    for mine, theirs in zip(got.settings, want.settings, strict=True):
        assert torch.equal(mine.cpu()[real], theirs[real])


@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("rows", "drafts"), [(1, 3), (4, 3), (6, 5)])
def test_drafts_that_hold_move_the_batch_on_as_single_steps_would(rows: int, drafts: int, warm: bool) -> None:
    """Logits hang on the position alone, one token is likely: some drafts hold, and each row can be checked alone."""
    held = 0
    for seed in range(3):
        state, host = State(seed, drafts, warm=warm), State(seed, drafts, warm=warm)
        host.to("cpu")
        got, want = (Rows.make(len(state.slots), rows, torch.device(device)) for device in (DEVICE, "cpu"))
        spread_rows(state.slots, state.last, state.lengths, state.drafted, state.settings, got)
        spread_rows_reference(host.slots, host.last, host.lengths, host.drafted, host.settings, want)
        rows_equal(got, want)
        logits = random(POSITIONS + 8, VOCAB, seed=seed)
        logits[:, 0] += 3
        at = logits[torch.where(want.ids >= 0, want.lengths, 0).long()].contiguous()
        chosen = torch.zeros(len(got.tokens), dtype=torch.int32, device=DEVICE)
        dummy = torch.zeros_like(chosen)
        if warm:
            space = draw_scratch(len(chosen), VOCAB, chosen.device)
            advance_drawn(at, got.ids, dummy, got.lengths.clone(), chosen, got.settings, space)
        else:
            advance_greedy(
                at, got.ids, dummy, got.lengths.clone(), chosen, greedy_scratch(len(chosen), VOCAB, chosen.device)
            )
        shape = (len(state.slots), verdict_width(rows, drafts))
        out, wanted = torch.full(shape, -7, dtype=torch.int32, device=DEVICE), torch.zeros(shape, dtype=torch.int32)
        before, old = host.lengths.clone(), host.drafted.tokens.clone()
        advance_verified(
            chosen, state.slots, got, state.drafted, state.last, state.lengths, out, state.history
        )  # fmt: skip
        advance_verified_reference(
            chosen.cpu(), host.slots, want, host.drafted, host.last, host.lengths, wanted, host.history
        )  # fmt: skip
        assert torch.equal(out.cpu(), wanted)
        for mine, theirs in zip(state.tensors(), host.tensors(), strict=True):
            assert torch.equal(mine.cpu(), theirs)
        verdict = read_verdict(wanted, rows)
        for b, slot in enumerate(host.slots.tolist()):
            if slot < 0 or not verdict.counts[b]:
                continue
            count = int(verdict.counts[b])
            matches = int(
                count_matches(verdict.chosen[b : b + 1].numpy(), old[slot : slot + 1].numpy(), np.array([count - 1]))[0]
            )
            held += matches
            assert host.lengths[slot] == before[slot] + matches + 1 <= host.drafted.limits[slot]
            for j in range(matches + 1):  # the token of each position is that of a step of its own
                alone = torch.zeros(1, dtype=torch.int32, device=DEVICE)
                one = [x[slot : slot + 1].contiguous().to(DEVICE) for x in host.settings]
                advance_drawn(
                    logits[before[slot] + j].view(1, -1), int32(0).to(DEVICE), torch.zeros_like(alone),
                    (before[slot : slot + 1] + j).to(DEVICE), alone, SlotSettings(*one),
                    draw_scratch(1, VOCAB, alone.device),
                )  # fmt: skip
                assert host.history[slot, before[slot] + j] == alone.item()
    assert held > 0 or rows == 1


def test_a_row_that_is_not_finite_ends_the_run() -> None:
    drafted = Drafted(*(x.to(DEVICE) for x in (int32(5, 6).view(1, 2), int32(2), int32(2), int32(99))))
    rows = Rows.make(1, 3, torch.device(DEVICE))
    slots, last, lengths = (int32(n).to(DEVICE) for n in (0, 1, 10))
    spread_rows(slots, last, lengths, drafted, SlotSettings.make(1, last.device), rows)
    out = torch.zeros(1, verdict_width(3, 2), dtype=torch.int32, device=DEVICE)
    advance_verified(int32(5, -1, 8).to(DEVICE), slots, rows, drafted, last, lengths, out)
    assert out.tolist() == [[3, 5, -1, 8, 2, 5, 6]]
    assert (last.item(), lengths.item(), drafted.num.item()) == (0, 12, 0)


def test_sizes_that_do_not_fit_are_refused() -> None:
    rows, slots = Rows.make(2, 3, torch.device("cpu")), int32(0, 1)
    drafted, some = Drafted.make(2, 2, torch.device("cpu")), int32(1, 1)
    with pytest.raises(KernelUnsupported, match="don't fit"):
        spread_rows(int32(0), some, some, drafted, SlotSettings.make(2, slots.device), rows)
    with pytest.raises(KernelUnsupported, match="numbers"):
        out = torch.zeros(2, 5, dtype=torch.int32)
        advance_verified(rows.tokens, slots, rows, drafted, some, some, out)
    with pytest.raises(KernelUnsupported, match="looks up"):
        look_up(slots, torch.zeros(2, 9).int(), some, drafted.tokens, drafted.num, lookup_scratch(2, slots.device),
                ngram_min=3, ngram_max=2)  # fmt: skip


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.sampled_from([(1, 1), (2, 4), (1, 3)]), st.integers(1, 5))
def test_look_ups_give_what_the_host_gives(seed: int, vocab: int, lengths: tuple[int, int], drafts: int) -> None:
    """Few tokens, so that matches of all lengths and at all distances come; histories from one token on."""
    rng = np.random.default_rng(seed)
    sizes = np.array([1, 2, 3, *rng.integers(4, 70, 2)], np.int32)
    tokens = rng.integers(0, vocab, (len(sizes), 80)).astype(np.int32)
    slots = np.array([3, 0, 4, 1, 2], np.int32)
    host = NgramDraft(tokens, ngram_min=lengths[0], ngram_max=lengths[1], max_drafts=drafts)
    guessed = host.guess(slots, sizes[slots])
    sent = [torch.from_numpy(x) for x in (np.concatenate([slots, [-1]]).astype(np.int32), tokens, sizes)]
    for device, function in ((DEVICE, look_up), ("cpu", look_up_reference)):
        on = [x.to(device) for x in sent]
        out, num = torch.full((5, drafts), -7, dtype=torch.int32, device=device), int32(9, 9, 9, 9, 9).to(device)
        scratch = (lookup_scratch(6, num.device),) if function is look_up else ()
        function(*on, out, num, *scratch, ngram_min=lengths[0], ngram_max=lengths[1])  # type: ignore[operator]
        assert (num.cpu().numpy()[slots] == guessed.found * drafts).all()
        assert (out.cpu().numpy()[slots][guessed.found] == guessed.tokens[guessed.found]).all()
        if function is look_up:
            assert not scratch[0][1].any()
