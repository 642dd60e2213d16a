"""Parts of a model whose bytes don't depend on what runs beside, and the proof of that on this machine at load.

A row of a product comes out the same in any batch if the library adds its terms in one order for every number of rows.
It does on most machines from some number of rows on; below, rows are padded to that number. Which number, a probe of
each shape finds, over the threads that the worker has and over one, so that workers with other threads agree too.
Where no number will do, products are cut into tiles of one size; where not even that holds, loading fails.

What a caller may do, and gets the same bytes: run a token alone or beside others, in any order; cut a prompt into any
chunks, at blocks or inside them; take a prefix from the cache; verify drafts. A replay of a DeepSeek-V4 that is to be
exact begins at a block boundary and is at least window * layers tokens long; a bounded one gives other bytes by design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.linear import Linear, Make, Projection, make_linear
from flowinfer.errors import ModelError
from flowinfer.kernels.paged_attention.invariant import Sizes, attend_in_splits

LEAST = (1, 2, 4, 8, 16, 32)  # rows that a product may need at least
TILES = (16, 32, 64)  # rows of a tile, where the number of rows always matters
MOST = 128  # rows of one call: what is proven reaches up to here
HEAVY = 1 << 22  # numbers in a weight above which MOST is HEAVY_MOST: a probe of a large head would take a second
HEAVY_MOST = 64
SPLITS = (1024, 512, 256, 128, 64)  # keys of a sum in attention
_COUNTS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 33, 63, 64, 65, 100, 128)
_LENGTHS = (64, 128, 256, 448, 704, 1024, 1408)
_CONTEXTS = (5, 60, 200, 400, 700, 1000)
Run = Callable[[Tensor], Tensor]


class RowsLinear:
    """A product in calls of `least` to `most` rows; with tile, of exactly that many."""

    def __init__(self, inner: Projection, *, least: int, most: int, tile: bool = False) -> None:
        self.inner, self.least, self.most, self.tile = inner, least, most, tile

    def __call__(self, x_TI: Tensor) -> Tensor:
        rows = x_TI.shape[0]
        if self.least <= rows <= self.most and not self.tile:
            return self.inner(x_TI)
        if not rows:
            return self.inner(x_TI.new_zeros(self.least, x_TI.shape[1]))[:0]
        return torch.cat([self._padded(part) for part in self._parts(x_TI)])

    def _parts(self, x_TI: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = x_TI.split(self.least if self.tile else self.most)
        return parts

    def _padded(self, x_TI: Tensor) -> Tensor:
        missing = self.least - x_TI.shape[0]
        if missing <= 0:
            return self.inner(x_TI)
        return self.inner(F.pad(x_TI, (0, 0, 0, missing)))[: x_TI.shape[0]]


class GroupedRows:
    """A product a group, for x [T, groups, in] and weights [groups, in, out]: [T, groups, out]."""

    def __init__(self, weights: list[Projection]) -> None:
        self._weights = weights

    def __call__(self, x_TGI: Tensor) -> Tensor:
        parts = zip(self._weights, x_TGI.unbind(1), strict=True)
        return torch.stack([weight(part.contiguous()) for weight, part in parts], 1)


class Invariance:
    """Makes such parts for one model on one device, and proves each shape once. Raises ModelError where it can't."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.make: Make = make_linear  # of a CPU's products
        self._proven: dict[object, tuple[int, int, bool]] = {}
        self._attention: dict[object, Sizes] = {}
        if device.type == "cpu":
            _prove_elementwise(dtype)

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Projection:
        """The product of this weight. On a GPU plain: kernels of one tile shape run it (see fused_invariant)."""
        if self.device.type != "cpu":
            return Linear(weight_OI, bias_O)
        return self.wrap(self.make(weight_OI, bias_O), weight_OI.shape, weight_OI.dtype, bias=bias_O is not None)

    def wrap(self, inner: Projection, shape: torch.Size, dtype: torch.dtype, *, bias: bool = False) -> Projection:
        """Any product of a weight [out, in], in calls of sizes that are proven for its kind and shape."""
        key = type(inner), tuple(shape), dtype, bias
        if key not in self._proven:
            self._proven[key] = prove_rows(inner, shape, dtype)
        least, most, tile = self._proven[key]
        return RowsLinear(inner, least=least, most=most, tile=tile)

    def wrapping(self, make: Make) -> Make:
        """What makes the same products, in such calls."""

        def wrapped(weight_OI: Tensor, bias_O: Tensor | None = None) -> Projection:
            return self.wrap(make(weight_OI, bias_O), weight_OI.shape, weight_OI.dtype, bias=bias_O is not None)

        return wrapped

    def grouped(self, weights_GIO: Tensor) -> GroupedRows:
        """The product of each group's weight."""
        return GroupedRows([self.linear(weight.t().contiguous()) for weight in weights_GIO])

    def attention(self, heads: int, kv_heads: int, head_dim: int) -> Sizes:
        """Sizes of attention's products, as plan_attention takes them."""
        key = heads // kv_heads, head_dim
        if key not in self._attention:
            self._attention[key] = prove_attention(heads // kv_heads, head_dim, self.dtype)
        return self._attention[key]

    @property
    def silu(self) -> Run:
        """silu without the vectorized form that rounds otherwise than the scalar one at the end of a tensor."""
        return F.silu if self.dtype is torch.bfloat16 else plain_silu


def plain_silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), an operation at a time."""
    return x / torch.exp(-x).add_(1)


def prove_rows(inner: Projection, shape: torch.Size, dtype: torch.dtype) -> tuple[int, int, bool]:
    """(least, most, tile) for RowsLinear: sizes of a call between which every row has the same bytes."""
    most = HEAVY_MOST if shape[0] * shape[1] > HEAVY else MOST
    counts = [count for count in _COUNTS if count <= most]
    calls = 16 if most == MOST else 1
    x = _numbers(most, shape[1], dtype)
    with _threads(1):
        whole = inner(x)
    wrong = {count for count in counts for threads in _both() if not _alike(inner, x, whole, count, calls, threads)}
    for least in LEAST:
        if not any(count >= least for count in wrong):
            return least, most, False
    for size in (size for size in TILES if size <= most):
        if _tiles_alike(inner, x[:size]):
            return size, size, True
    raise ModelError(
        f"batch_invariant: products of {list(shape)} in {_name(dtype)} differ by the rows beside them on this machine.",
        help="Use the other dtype, `threads: 1`, or leave batch_invariant out.",
    )


def prove_attention(group: int, head_dim: int, dtype: torch.dtype) -> Sizes:
    """Sizes with which a query comes out the same with others beside and behind it and in a longer context."""
    longest = max(_LENGTHS)
    q, k, v = (_numbers(rows, head_dim, dtype) for rows in (8, longest, longest))
    for sizes in (Sizes(least, split) for split in SPLITS for least in LEAST):
        if all(_attends_alike(q, k, v, context, group, sizes) for context in _CONTEXTS):
            return sizes
    raise ModelError(
        f"batch_invariant: attention over heads of {head_dim} in {_name(dtype)} differs by what runs beside it here.",
        help="Use the other dtype, `threads: 1`, or leave batch_invariant out.",
    )


def _attends_alike(q: Tensor, k: Tensor, v: Tensor, context: int, group: int, sizes: Sizes) -> bool:
    """Whether the query at the end of a context comes out the same with others in front, beside and behind."""
    lengths = [length for length in _LENGTHS if length >= context]
    cases = [(length, queries, 1) for length in lengths for queries in (1, 3)]
    cases += [(lengths[0], queries, batch) for queries in (1, 2, 8) for batch in (1, 4)]
    wanted: Tensor | None = None
    for threads, (length, queries, batch) in product(_both(), cases):
        rows = q[-queries:].repeat(group, 1).repeat(batch, 2, 1, 1)
        keys, values = (part[:length].repeat(batch, 2, 1, 1) for part in (k, v))
        unseen = torch.arange(length) >= torch.arange(context - queries + 1, context + 1).unsqueeze(1)
        mask = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, -torch.inf).repeat(group, 1)
        mask[:, 0] = 0  # queries before the start see something too
        with _threads(threads):
            out = attend_in_splits(rows, keys, values, attn_mask=mask.repeat(batch, 1, 1, 1), sizes=sizes)
        found = out[-1, 0, queries - 1 :: queries]
        wanted = found if wanted is None else wanted
        if not torch.equal(found, wanted):
            return False
    return True


def _alike(inner: Projection, x: Tensor, whole: Tensor, count: int, calls: int, threads: int) -> bool:
    """Whether rows in calls of `count` come out as they do in the whole; small calls have fewer rows to tell."""
    calls = min(x.shape[0] // count, calls if count <= 8 else 1)
    with _threads(threads):
        starts = (x.shape[0] - (i + 1) * count for i in range(calls))
        return all(torch.equal(inner(x[at : at + count].contiguous()), whole[at : at + count]) for at in starts)


def _tiles_alike(inner: Projection, x: Tensor) -> bool:
    """Whether a row's place in a tile, and what else is there, change nothing."""
    with _threads(1):
        whole = inner(x)
    for threads, by in product(_both(), range(0, x.shape[0], 3)):
        with _threads(threads):
            turned = inner(x.roll(by, 0)).roll(-by, 0)
            first = inner(F.pad(x[:1], (0, 0, 0, x.shape[0] - 1)))[:1]
        if not (torch.equal(turned, whole) and torch.equal(first, whole[:1])):
            return False
    return True


def _prove_elementwise(dtype: torch.dtype) -> None:
    """Functions that models use: the end of a tensor is computed by another form than its middle."""
    x = _numbers(64, 64, dtype).flatten() * 4
    silu = F.silu if dtype is torch.bfloat16 else plain_silu
    runs: dict[str, Run] = {
        "silu": silu,
        "rotation": lambda part: (part * 1.1).addcmul_(part, part + 0.3),
        "exp": lambda part: torch.exp(part.float()),
        "tanh": lambda part: torch.tanh(part.float()),
        "log1p": lambda part: torch.log1p(torch.exp(part.float())),
        "cos": lambda part: torch.cos(part.float() * 100),
        "sin": lambda part: torch.sin(part.float() * 100),
    }
    for name, run in runs.items():
        if not torch.equal(torch.cat([run(part) for part in x.split(13)]), run(x)):
            raise ModelError(
                f"batch_invariant: {name} in {_name(dtype)} differs by a number's place in memory on this machine.",
                help="Use the other dtype, or leave batch_invariant out.",
            )


def _numbers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(rows * 100_003 + columns)
    return torch.randn(rows, columns, generator=made).to(dtype)


def _both() -> tuple[int, ...]:
    """Threads to prove with: the worker's own and one."""
    own = torch.get_num_threads()
    return (1,) if own == 1 else (1, own)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    own = torch.get_num_threads()
    if count != own:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != own:
            torch.set_num_threads(own)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
