"""Block events as other routers read them: the public format that vLLM began. Knows no sockets and decides nothing.

A batch is a msgpack array [time, [event, ...], rank]; an event an array that begins with its name: BlockStored (hashes,
parent hash, token ids, tokens of a block, LoRA id, medium), BlockRemoved (hashes, medium), AllBlocksCleared. As a `map`
an event has its name as `type`, and the same fields by name: so vLLM (0.33) and SGLang (0.5.23) write it now. Dynamo
reads both, llm-d arrays. Hashes are the last 8 bytes of our names as unsigned numbers, as vLLM gives its own.

Readers hash the token ids themselves, so a block is told only with its tokens. Those of a prompt are known when it
passes; what a decode worker wrote is told when the first prompt names it, which is the next turn of that chat.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from flowinfer.cache.tiers import DISK, OBJECT
from flowinfer.message import Ids

# Names that Dynamo and SGLang know; others are "GPU": the pool that a worker computes from, whatever its device.
MEDIA = {DISK: "DISK", OBJECT: "EXTERNAL"}
MAX_CONTENTS = 65_536  # blocks whose tokens are remembered: 16 MiB at 64 tokens
Send = Callable[[str, bytes], None]  # owner, batch
Form = Literal["array", "map"]  # of an event


class _Stored(msgspec.Struct, array_like=True, tag="BlockStored", frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved", frozen=True):
    block_hashes: list[int]
    medium: str


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", frozen=True):
    pass


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int


class _Content(NamedTuple):
    parent: bytes | None
    tokens: Ids


class BlockEvents:
    """Turns what workers report into batches, one owner each; an owner's rank is its place in order of appearance.

    Every method may be repeated.
    """

    def __init__(self, block_tokens: int, send: Send, wall: Callable[[], float], form: Form = "array") -> None:
        self.block_tokens, self.form = block_tokens, form
        self._send, self._wall = send, wall
        self._contents: OrderedDict[bytes, _Content] = OrderedDict()
        self._told: dict[str, set[bytes]] = {}
        self._untold: dict[bytes, set[str]] = {}  # held by these owners, but its tokens aren't known yet
        self._ranks: dict[str, int] = {}

    def seen(self, names: Sequence[bytes], tokens: Ids) -> None:
        """A prompt of these blocks passed; tells of those that somebody holds already."""
        for number, name in enumerate(names):
            start = number * self.block_tokens
            parent = names[number - 1] if number else None
            self._contents[name] = _Content(parent, tokens[start : start + self.block_tokens])
            self._contents.move_to_end(name)
        while len(self._contents) > MAX_CONTENTS:
            self._contents.popitem(last=False)
        owners = {owner for name in names for owner in self._untold.get(name, ())}
        for owner in sorted(owners):
            self.stored(owner, [name for name in names if owner in self._untold.get(name, ())])

    def stored(self, owner: str, names: Iterable[bytes]) -> None:
        """`owner` holds these blocks from now on."""
        told = self._told.setdefault(owner, set())
        known: list[bytes] = []
        for name in names:
            if name in told:
                continue
            if name in self._contents:
                known.append(name)
                self._learned(owner, name)
            else:
                self._untold.setdefault(name, set()).add(owner)
        told.update(known)
        self._publish(owner, [self._stored(owner, run) for run in self._runs(known)])

    def removed(self, owner: str, names: Iterable[bytes]) -> None:
        """`owner` holds these blocks no more."""
        told, names = self._told.get(owner, set()), list(names)
        gone = [name for name in names if name in told]
        told.difference_update(gone)
        for name in names:
            self._learned(owner, name)
        self._publish(owner, [_Removed(list(map(_number, gone)), _medium(owner))] if gone else [])

    def cleared(self, owner: str) -> None:
        """`owner` holds nothing any more."""
        for name in [name for name, owners in self._untold.items() if owner in owners]:
            self._learned(owner, name)
        if self._told.pop(owner, None):
            self._publish(owner, [_Cleared()])

    def _learned(self, owner: str, name: bytes) -> None:
        """Nothing is left to tell of this block of this owner."""
        owners = self._untold.get(name)
        if owners is not None:
            owners.discard(owner)
            if not owners:
                del self._untold[name]

    def _runs(self, names: list[bytes]) -> Iterator[list[bytes]]:
        """Blocks that follow each other, together."""
        run: list[bytes] = []
        for name in names:
            if run and self._contents[name].parent != run[-1]:
                yield run
                run = []
            run.append(name)
        if run:
            yield run

    def _stored(self, owner: str, run: list[bytes]) -> _Stored:
        parent = self._contents[run[0]].parent
        tokens = [token for name in run for token in self._contents[name].tokens.tolist()]
        before = None if parent is None else _number(parent)
        return _Stored(list(map(_number, run)), before, tokens, self.block_tokens, None, _medium(owner))

    def _publish(self, owner: str, events: Sequence[_Stored | _Removed | _Cleared]) -> None:
        if events:
            rank = self._ranks.setdefault(owner, len(self._ranks))
            told = list(events) if self.form == "array" else list(map(_as_map, events))
            self._send(owner, msgspec.msgpack.encode(_Batch(self._wall(), told, rank)))


def _as_map(event: _Stored | _Removed | _Cleared) -> dict[str, Any]:
    fields = {"type": event.__struct_config__.tag, **msgspec.structs.asdict(event)}
    return fields | ({"lora_name": None} if isinstance(event, _Stored) else {})


def _medium(owner: str) -> str:
    return MEDIA.get(owner, "GPU")


def _number(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")
