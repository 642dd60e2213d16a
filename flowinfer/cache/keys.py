"""Names KV blocks by content: a chain hash over namespace, tenant salt and tokens. Knows nothing of where blocks lie.

A block's name covers every token before it, so equal names mean equal KV. A collision would hand one tenant another
tenant's KV, so the hash is cryptographic: BLAKE2b-128, whose own 16-byte salt takes the parent's name. That keeps a
block of 64 tokens at two compressions: about 1 us a block here, 30 us for 2,048 tokens; hashing parent and tokens as
one string took 33 us, sha256 31-37, BLAKE2s 42.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

from flowinfer.message import Ids

NAME_BYTES = 16
BLOCK_TOKENS = 64  # as in engine.layout, which this package may not import


@lru_cache(maxsize=4096)
def chain_root(namespace: str, salt: str) -> bytes:
    """The parent of first blocks: 16 bytes that differ for every namespace (KV layout) and every tenant salt."""
    inner = blake2b(namespace.encode(errors="surrogatepass"), digest_size=32, person=b"flowinfer-ns").digest()
    return blake2b(
        inner + salt.encode(errors="surrogatepass"), digest_size=NAME_BYTES, person=b"flowinfer-root"
    ).digest()


def chain_hashes(tokens: Ids, *, namespace: str, salt: str, block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """Names of the full blocks of `tokens` (int32 [n], from position 0): n // block_tokens names of 16 bytes."""
    return extend_chain(None, tokens, namespace=namespace, salt=salt, block_tokens=block_tokens)


def state_name(name: bytes) -> bytes:
    """The name under which stores keep the state of this block (see cache.replay) beside its entries."""
    return blake2b(name, digest_size=NAME_BYTES, person=b"flowinfer-state").digest()


def extend_chain(
    parent: bytes | None, tokens: Ids, *, namespace: str, salt: str, block_tokens: int = BLOCK_TOKENS
) -> list[bytes]:
    """Names of the full blocks of `tokens`, which follow the block named `parent` (None: they start the sequence).

    A tail shorter than block_tokens has no name yet. extend_chain(names[-1], rest) continues chain_hashes(first).
    """
    name = chain_root(namespace, salt) if parent is None else parent
    num_bytes = len(tokens) // block_tokens * block_tokens * 4
    data = memoryview(np.asarray(tokens, dtype="<i4").tobytes())
    step, names = block_tokens * 4, []
    for start in range(0, num_bytes, step):
        name = blake2b(data[start : start + step], digest_size=NAME_BYTES, salt=name).digest()
        names.append(name)
    return names
