"""copy_blocks in plain torch."""

from __future__ import annotations

from torch import Tensor


def copy_blocks_reference(target: Tensor, source: Tensor, ids_B2: Tensor) -> None:
    """As copy_blocks, for two tensors."""
    to, of = ids_B2.long().unbind(1)
    target[to] = source[of]
