"""What a transport that writes into a taker's pool does for its sender: makes links, copies by them, takes them down.

A link is what is needed to write to one life of a taker: a mapped pool, a connection.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from flowinfer.message import Ids
from flowinfer.transfer.transport import Push, TransferError

T = TypeVar("T")


class Address(Protocol):
    """Where a taker's pool is."""

    @property
    def num_blocks(self) -> int:
        """Of the pool."""

    @property
    def block_bytes(self) -> int:
        """Of one block."""


class Copying(Protocol):
    """Blocks on their way."""

    def query(self) -> bool:
        """Whether they are all there. Raises TransferError when they won't come; then nothing is written any more."""

    def synchronize(self) -> None:
        """Waits until they are, or won't come."""


class Links(Protocol):
    """What a transport does for its sender."""

    def read(self, push: Push) -> Address:
        """push.address, understood. Raises TransferError for a pool that can't be reached this way."""

    def open(self, address: Any) -> Any:
        """Makes a link. For background threads: may take seconds. Raises FlowInferError."""

    def close(self, link: Any) -> None:
        """Takes it down; nothing is under way by it. For background threads."""

    def mark(self) -> Any:
        """What our device has been told to do by now; a copy waits for it."""

    def copy(self, link: Any, ids: Ids, mark: Any) -> Copying:
        """Starts to write our block ids[b, 1] over block ids[b, 0] of the taker's pool, for each b. May raise."""

    def checks(self, ids: Ids) -> list[int]:
        """xxh3_64 of these blocks of ours, 0 each where the taker needn't check."""


def read_address(push: Push, kind: type[T]) -> T:
    """push.address, understood. Raises TransferError."""
    try:
        return msgspec.msgpack.decode(push.address, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError(f"{push.to} doesn't say where its pool is: {error}") from error
