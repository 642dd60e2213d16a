"""The shape of a model's KV in memory, computed from its config.json alone. Never imports torch."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

BLOCK_TOKENS = 64  # 16 gains 3 % more hits on agent traces but quadruples the index and the per-step table
KV_FP8 = "float8_e4m3fn"  # of `kv_dtype: fp8`: numbers as they are, up to 448
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, KV_FP8: 1}
KV_FORMAT = 1  # raised by hand when the bytes of a block change meaning; a release alone must not empty a cache of days


class KVSection(msgspec.Struct, frozen=True):
    """Part of a block of a model with several kinds of KV: rows of width numbers. group: window, compressed, state.

    at_end: whether what follows a whole block needs it; rows of groups that end with the block do not.
    """

    group: str
    name: str
    rows: int
    width: int
    at_end: bool = True

    @property
    def part(self) -> str:
        """Which part of a block it belongs to: see KVLayout.parts."""
        return "entries" if self.group == "compressed" else "state" if self.at_end else "rest"


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Paged KV of a dense-attention model: a block is [layers, 2 (K, V), kv_heads, block_tokens, head_dim] of dtype.

    Heads come before tokens: batched products over a head's 64 rows beat token-major blocks two- to threefold on CPU.
    Where sections are given, a block is those, one after the other, instead: first what every token behind it may read
    (compressed entries), then what only the next `window` tokens and the next group do.
    model is the digest of weights and configuration, so that blocks of other weights never match.
    quantized: int8, int4 or fp8, where the weights were made that as they were loaded (formats.numbers_of).
    kernels: with batch_invariant, what computed the bytes (graph.kernel_set), so that blocks of others never match.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS
    tensor_parallel: int = 1
    sections: tuple[KVSection, ...] = ()
    window: int = 0
    kernels: str = ""
    quantized: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        if self.sections:
            return sum(self.group_bytes().values())
        per_token = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * self.block_tokens * per_token

    @property
    def digest(self) -> str:
        """Names everything that changes the bytes: 16 hex characters."""
        return hashlib.sha256(msgspec.json.encode([KV_FORMAT, self])).hexdigest()[:16]

    def group_bytes(self) -> dict[str, int]:
        """Bytes of a block by kind of KV, for layouts with sections."""
        found: dict[str, int] = {}
        for part in self.sections:
            found[part.group] = found.get(part.group, 0) + part.rows * part.width * DTYPE_BYTES[self.dtype]
        return found

    @property
    def parts(self) -> dict[str, slice]:
        """The parts of a block as stores keep them, as slices of its elements.

        entries: what every later token may read; without sections, all of it.  state: what goes on at the end of the
        block, the window keys and rows that the next group shares; only kept where somebody may begin behind it.
        """
        if not self.sections:
            whole = self.num_layers * 2 * self.num_kv_heads * self.block_tokens * self.head_dim
            return {"entries": slice(0, whole), "state": slice(whole, whole)}
        sizes = {"entries": 0, "state": 0, "rest": 0}
        for section in self.sections:
            sizes[section.part] += section.rows * section.width
        entries, state = sizes["entries"], sizes["state"]
        return {"entries": slice(0, entries), "state": slice(entries, entries + state)}

    def part_bytes(self, part: str) -> int:
        """Bytes of "entries" or "state" of a block."""
        found = self.parts[part]
        return len(range(found.start, found.stop)) * DTYPE_BYTES[self.dtype]

    def namespace(self, *, approximate: bool) -> str:
        """Under which blocks are named. What a bounded replay made is never found by those who want it exact."""
        return f"{self.digest}-bounded" if approximate and self.window else self.digest

    @property
    def block_shape(self) -> tuple[int, ...]:
        """A block as a tensor of dtype."""
        if self.sections:
            return (sum(part.rows * part.width for part in self.sections),)
        return self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in a full block."""
        return self.block_bytes / self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_tokens)

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes that a request of num_tokens tokens holds: whole blocks."""
        return self.blocks_for(num_tokens) * self.block_bytes

    def traits(self) -> dict[str, str]:
        """What two ends must have alike, to name where they don't."""
        return {name: str(value) for name, value in self.describe().items() if name != "sections"}

    def describe(self) -> dict[str, Any]:
        """For messages that print two layouts side by side."""
        return msgspec.structs.asdict(self)
