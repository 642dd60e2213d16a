"""What one model step computes: flat tokens of several sequences and where their KV lies. Chooses nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Replays:
    """Of a model with windows, int32 [S], host: what a sequence may read and write while its prefix is replayed.

    window_from: window keys of earlier positions aren't read.  entries_from: compressed entries of earlier positions
    are there already and aren't written. 0 for sequences that replay nothing.
    """

    window_from: Int32s
    entries_from: Int32s


@dataclass(frozen=True, slots=True)
class Features:
    """Output of chosen layers for the rows of logits: what a draft head reads. A forward pass fills it in.

    layers: from 0, in the order that the reader wants.  outputs: by layer [R, H] in the model's dtype, the residual
    stream after that layer and before any final norm; where a model has several streams, their mean.
    """

    layers: tuple[int, ...]
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def joined(self) -> Tensor:
        """[R, layers * H]."""
        import torch

        return torch.cat([self.outputs[layer] for layer in self.layers], 1)


@dataclass(frozen=True, slots=True)
class StepInput:
    """T tokens of S sequences, laid end to end.

    tokens        int64 [T] on the model's device
    positions     int64 [T] on the model's device; a sequence's tokens are its last ones, in order
    query_starts  int32 [S + 1], host: tokens of sequence s are query_starts[s]:query_starts[s + 1]
    kv_lens       int32 [S], host: context length of each sequence, this step's tokens included
    block_tables  int32 [S, max_blocks], host: block ids of the arena, padded with any valid id
    logit_rows    int64 [R] on the model's device: rows of T whose logits are wanted; None skips the head
    replays       None where no sequence replays a part of its prefix
    features      takes the output of some layers for the same rows; None: nobody asks
    """

    tokens: Tensor
    positions: Tensor
    query_starts: Int32s
    kv_lens: Int32s
    block_tables: Int32s
    logit_rows: Tensor | None
    replays: Replays | None = None
    features: Features | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.query_starts[-1])

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.kv_lens)

    def wants(self, layer: int) -> bool:
        """Whether somebody asks for the output of this layer."""
        return self.features is not None and layer in self.features.layers and self.logit_rows is not None

    def give(self, layer: int, x_RH: Tensor) -> None:
        """The output of a wanted layer, rows of logits only."""
        assert self.features is not None, "only what is wanted is given"
        self.features.outputs[layer] = x_RH


def blocks_of_tokens(step: StepInput, counts: Int32s, block_tokens: int) -> Int32s:
    """int32 [T]: the arena block that each token's keys and values go to."""
    sequence = np.repeat(np.arange(len(counts)), counts)
    first = step.kv_lens - counts - step.query_starts[:-1]
    position = np.arange(len(sequence)) + first[sequence]
    return np.ascontiguousarray(step.block_tables[sequence, position // block_tokens], np.int32)
