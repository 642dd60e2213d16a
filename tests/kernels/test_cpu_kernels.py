"""The compiled loops of a CPU against float64 references: odd sizes, both dtypes, any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowinfer.kernels import compiled

if compiled.missing():
    pytest.skip(f"compiled loops need {compiled.missing()}", allow_module_level=True)

from flowinfer.kernels.activation import silu_mul_reference
from flowinfer.kernels.activation.cpu import silu_mul
from flowinfer.kernels.norm import rms_norm_reference
from flowinfer.kernels.norm.cpu import rms_norm
from flowinfer.kernels.paged_attention.cpu import attend, plan_pages
from flowinfer.kernels.prefill_attention import prefill_attention_reference
from flowinfer.kernels.rope import Heads, rope_write_reference
from flowinfer.kernels.rope.cpu import rope_write

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
BLOCK = 8
Sequences = list[tuple[int, int]]  # context before the step, and tokens in it
sequences = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 6, 17, 60])), min_size=1, max_size=5)
heads_of = st.sampled_from([Heads(6, 2, 16), Heads(9, 3, 64), Heads(2, 2, 128), Heads(8, 1, 24), Heads(64, 1, 16)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@given(rows=st.integers(1, 9), width=st.integers(1, 200), dtype=dtypes, adds=st.booleans())
@settings(max_examples=40, deadline=None)
def test_norm_adds_and_norms(rows: int, width: int, dtype: torch.dtype, adds: bool) -> None:
    torch.manual_seed(rows * width)
    x, delta = torch.randn(2, rows, width).to(dtype)
    weight = torch.rand(width) + 0.5
    want = rms_norm_reference(x.double(), weight.double(), 1e-5, delta=delta.double() if adds else None)
    got = rms_norm(x.clone(), weight, 1e-5, delta=delta if adds else None)
    _close(got[0], want[0], dtype)
    _close(got[1], want[1], dtype)


@given(rows=st.integers(1, 9), width=st.integers(1, 200), dtype=dtypes, scale=st.sampled_from([1.0, 30.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_silu_holds_from_nought_to_where_exp_overflows(rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(rows * width)
    x = (torch.randn(rows, 2 * width) * scale).to(dtype)
    _close(silu_mul(x), silu_mul_reference(x.double()), dtype)


@given(sequences=sequences, heads=heads_of, dtype=dtypes, norms=st.booleans())
@settings(max_examples=60, deadline=None)
def test_attention_over_pages_with_rotation_and_norms(
    sequences: Sequences, heads: Heads, dtype: torch.dtype, norms: bool
) -> None:
    case = Case(sequences, heads, dtype, norms)
    want, kv = case.reference()
    _close(case.run(), want, dtype)
    written = ~kv.isnan()
    assert torch.equal(~case.kv.isnan(), written), "nothing but the step's own tokens was written"
    _close(case.kv[written], kv[written], dtype)


long_sequences = st.lists(
    st.tuples(st.sampled_from([0, 1, 63, 500, 511, 512, 700, 1100]), st.sampled_from([1, 1, 2, 7, 16, 17, 40, 130])),
    min_size=1,
    max_size=4,
)
long_heads = st.sampled_from([Heads(9, 3, 64), Heads(2, 2, 128), Heads(14, 2, 64), Heads(5, 1, 128), Heads(4, 2, 96)])


@given(sequences=long_sequences, heads=long_heads, block=st.sampled_from([16, 64, 128]))
@settings(max_examples=25, deadline=None)
def test_attention_over_contexts_that_are_summed_in_parts(sequences: Sequences, heads: Heads, block: int) -> None:
    case = Case(sequences, heads, torch.bfloat16, norms=False, block=block)
    want, _ = case.reference()
    _close(case.run(), want, torch.bfloat16)


@given(
    before=st.sampled_from([0, 1, 62, 63, 510, 513]), count=st.integers(1, 45), heads=long_heads,
    dtype=dtypes, block=st.sampled_from([16, 64]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_invariant_a_token_gets_the_same_bytes_in_any_chunk(
    before: int, count: int, heads: Heads, dtype: torch.dtype, block: int
) -> None:
    case = Case([(before, count)], heads, dtype, norms=False, block=block)
    together = case.run(invariant=True)
    for first, last in ((t, t + 1) for t in range(count)):
        assert torch.equal(case.part(first, last), together[first:last])
    for cut in range(1, count, 7):
        assert torch.equal(torch.cat([case.part(0, cut), case.part(cut, count)]), together)


def test_a_token_gets_the_same_bytes_whatever_is_decoded_beside_it() -> None:
    many = Case([(40, 1), (3, 2), (77, 1), (0, 1)], Heads(9, 3, 64), torch.bfloat16, norms=False)
    together = many.run()
    for s in range(4):
        assert torch.equal(many.alone(s), together[many.rows(s)])


def test_nan_is_not_lost() -> None:
    x = torch.randn(4, 32)
    x[2, 5] = float("nan")
    weight = torch.ones(32)
    assert rms_norm(x.clone(), weight, 1e-5)[1].isnan().any(1).tolist() == [False, False, True, False]
    assert silu_mul(x).isnan().any(1).tolist() == [False, False, True, False]
    assert rms_norm(torch.zeros(4, 32), weight, 1e-5, delta=x)[0].isnan().any(1).tolist() == [False, False, True, False]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(KeyError):
        silu_mul(torch.zeros(2, 8, dtype=torch.float16))


class Case:
    """Random heads of a step; what lies in pages before it is random, the rest of the arena is NaN."""

    def __init__(self, sequences: Sequences, heads: Heads, dtype: torch.dtype, norms: bool, block: int = BLOCK) -> None:
        torch.manual_seed(len(sequences))
        rng = np.random.default_rng(3)
        n, k, d = self.heads = heads
        counts = np.array([count for _, count in sequences], np.int32)
        self.lengths = np.array([before + count for before, count in sequences], np.int32)
        most = -(-int(self.lengths.max()) // block)
        self.tables = rng.permutation(most * len(counts)).reshape(len(counts), most).astype(np.int32)
        self.starts = np.cumsum([0, *counts]).astype(np.int32)
        self.kv = torch.full((most * len(counts), 2, 2, k, block, d), float("nan"), dtype=dtype)
        for s, (before, _) in enumerate(sequences):
            for t in range(before):
                self.kv[self.tables[s, t // block], 1, :, :, t % block] = torch.randn(2, k, d).to(dtype)
        positions = [np.arange(length - count, length) for length, count in zip(self.lengths, counts, strict=True)]
        blocks = [self.tables[s, at // block] for s, at in enumerate(positions)]
        self.positions = torch.from_numpy(np.concatenate(positions).astype(np.int64))
        self.blocks = torch.from_numpy(np.concatenate(blocks).astype(np.int32))
        self.qkv = torch.randn(int(counts.sum()), (n + 2 * k) * d).to(dtype)
        angles = torch.rand(int(self.lengths.max()), d) * 6
        self.rope = (angles.cos().to(dtype), angles.sin().to(dtype))
        self.norms = (torch.rand(d) + 0.5, torch.rand(d) + 0.5) if norms else None

    def rows(self, s: int) -> slice:
        """Of the tokens of a sequence."""
        return slice(int(self.starts[s]), int(self.starts[s + 1]))

    def run(self, *, invariant: bool = False) -> Tensor:
        """[T, N D] by the compiled loops; kv is written."""
        own = self.positions, self.blocks, self.starts, self.lengths, self.tables
        return self._run(self.qkv, *own, invariant=invariant)

    def part(self, first: int, last: int) -> Tensor:
        """The same of some tokens of the only sequence, in the invariant mode."""
        own, starts = slice(first, last), np.array([0, last - first], np.int32)
        length = self.lengths - (len(self.positions) - last)
        parts = (x[own].clone() for x in (self.qkv, self.positions, self.blocks))
        return self._run(*parts, starts, length.astype(np.int32), self.tables, invariant=True)

    def alone(self, s: int) -> Tensor:
        """The same of one sequence."""
        own = self.rows(s)
        starts = np.array([0, own.stop - own.start], np.int32)
        part = slice(s, s + 1)
        return self._run(
            self.qkv[own].clone(), self.positions[own].clone(), self.blocks[own].clone(), starts, self.lengths[part],
            self.tables[part],
        )  # fmt: skip

    def _run(
        self,
        qkv: Tensor,
        positions: Tensor,
        blocks: Tensor,
        starts: np.ndarray,
        *lengths: np.ndarray,
        invariant: bool = False,
    ) -> Tensor:
        queries = rope_write(qkv, self.kv, 1, self.heads, positions, blocks, self.rope, self.norms, 1e-6)
        return attend(queries, self.kv, 1, plan_pages(starts, *lengths, self.heads, self.kv, invariant=invariant))

    def reference(self) -> tuple[Tensor, Tensor]:
        """Attention and kv in float64."""
        kv = self.kv.double()
        rope = (self.rope[0].double(), self.rope[1].double())
        norms = None if self.norms is None else (self.norms[0].double(), self.norms[1].double())
        qk = rope_write_reference(self.qkv.double(), kv, 1, self.heads, self.positions, self.blocks, rope, norms, 1e-6)
        return prefill_attention_reference(qk, kv, 1, self.heads, self.starts, self.lengths, self.tables), kv
