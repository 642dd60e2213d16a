"""Requests made from a trace: prompts of made-up tokens that share what the traced ones shared, at the traced times.

Equal block ids become equal token blocks, so that the cache finds in them what it would have found in the originals;
lengths and times can be scaled down to what the machine at hand can run. Times hold within the groups that are sent
together: between them both sides take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from flowinfer.compare.asks import COMPLETION, Ask
from flowinfer.errors import FlowInferError
from flowinfer.sim.trace import Trace, TraceRequest

# Ids that are ordinary text in every vocabulary that is met: above bytes and most control tokens, below the smallest
# vocabularies of use.
FIRST_ID, LAST_ID = 300, 2_000


@dataclass(frozen=True)
class TraceOptions:
    """How a trace is run. first: so many of its requests, 0 for all; scale: of lengths; speed: of its clock."""

    first: int = 0
    scale: float = 1.0
    speed: float = 1.0
    block_tokens: int = 512


def asks_of(trace: Trace, options: TraceOptions) -> list[Ask]:
    """The trace as completions of token ids. Raises FlowInferError where a scale leaves blocks nothing."""
    size = round(trace.block_tokens * options.scale)
    if size < 1:
        message = f"At --trace-scale {options.scale:g} a block of {trace.block_tokens} tokens has none left."
        raise FlowInferError(message, help=f"The least is {1 / trace.block_tokens:.2g}.")
    chosen = trace.requests[: options.first or None]
    begin = chosen[0].at if chosen else 0.0
    return [
        Ask(
            name=str(number),
            path=COMPLETION,
            body={
                "prompt": prompt_of(request, trace.block_tokens, size).tolist(),
                "max_tokens": max(1, round(request.output_length * options.scale)),
                "ignore_eos": True,
            },
            at=(request.at - begin) / options.speed,
        )
        for number, request in enumerate(chosen, start=1)
    ]


def prompt_of(request: TraceRequest, block_tokens: int, size: int) -> NDArray[np.int32]:
    """Token ids of a traced prompt, `size` for each of its blocks of `block_tokens`, the last cut as the prompt was."""
    whole, rest = divmod(request.input_length, block_tokens)
    length = whole * size + max(1, round(rest * size / block_tokens)) if rest else whole * size
    blocks = [block_of(name, size) for name in request.blocks]
    tokens = np.concatenate(blocks) if blocks else block_of(b"", size)
    if len(tokens) < length:  # more tokens than named blocks: what isn't named is nobody else's
        own = f"{request.at} {request.session}".encode()
        extra = [block_of(own + bytes([i % 256, i // 256]), size) for i in range(-(-(length - len(tokens)) // size))]
        tokens = np.concatenate([tokens, *extra])
    return tokens[: max(1, length)]


def block_of(name: bytes, size: int) -> NDArray[np.int32]:
    """The tokens of a block, the same for the same name."""
    seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
    return np.random.default_rng(seed).integers(FIRST_ID, LAST_ID, size, dtype=np.int32)
