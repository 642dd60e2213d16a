"""Reads request traces: when each request came and which blocks its prompt is made of. Replays nothing.

The format is that of Mooncake (JSON lines): timestamp in ms, input_length and output_length in tokens, hash_ids, the
ids of the prompt's blocks. Equal ids mean equal prompts up to the end of that block, the last of which may be partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from flowinfer.cache.keys import NAME_BYTES
from flowinfer.errors import FlowInferError


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int | str = ""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. at: seconds from the trace's start; lengths in tokens; blocks: names of its prompt's blocks."""

    at: float
    input_length: int
    output_length: int
    blocks: tuple[bytes, ...]
    session: str = ""


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they came. block_tokens: tokens of a block."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]

    @property
    def num_blocks(self) -> int:
        """Blocks of all prompts, counted once a use."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def working_set(self) -> int:
        """Different blocks."""
        return len({name for request in self.requests for name in request.blocks})

    @property
    def longest(self) -> int:
        """Blocks of the longest prompt; a smaller cache can't hold it."""
        return max((len(request.blocks) for request in self.requests), default=0)


def read_trace(path: str | Path, block_tokens: int = 512) -> Trace:
    """The trace of a file. Raises FlowInferError naming the line that isn't a request."""
    path, requests = Path(path), []
    names: dict[int, bytes] = {}
    decoder = msgspec.json.Decoder(_Row)
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            message = f"{path}:{number} is no request of a trace: {error}"
            help = "Each line is a JSON object with timestamp, input_length, output_length and hash_ids."
            raise FlowInferError(message, help=help) from error
        blocks = tuple(names.setdefault(id, _name(id)) for id in row.hash_ids)  # one object a block
        requests.append(
            TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, blocks, str(row.session_id))
        )
    return Trace(path.stem, block_tokens, tuple(sorted(requests, key=lambda request: request.at)))


def _lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise FlowInferError(f"The trace {path} can't be read: {error.strerror}.") from error


def _name(id: int) -> bytes:
    """As evenly spread as the names of true blocks, which sketches count on."""
    return blake2b(id.to_bytes(8, "big", signed=True), digest_size=NAME_BYTES).digest()
