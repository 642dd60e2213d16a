"""What one model step computes: flat tokens of several sequences and where their KV lies. Chooses nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """T tokens of S sequences, laid end to end.

    tokens        int64 [T] on the model's device
    positions     int64 [T] on the model's device; a sequence's tokens are its last ones, in order
    query_starts  int32 [S + 1], host: tokens of sequence s are query_starts[s]:query_starts[s + 1]
    kv_lens       int32 [S], host: context length of each sequence, this step's tokens included
    block_tables  int32 [S, max_blocks], host: block ids of the arena, padded with any valid id
    logit_rows    int64 [R] on the model's device: rows of T whose logits are wanted; None skips the head
    """

    tokens: Tensor
    positions: Tensor
    query_starts: Int32s
    kv_lens: Int32s
    block_tables: Int32s
    logit_rows: Tensor | None

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.query_starts[-1])

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.kv_lens)
