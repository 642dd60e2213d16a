"""Kernels one after the other in one parallel region, without Python or the start of threads between. Imports numba."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from flowinfer.kernels.compiled import Kernel
from flowinfer.kernels.loops import run_phases

Int64s = npt.NDArray[np.int64]
Value = int | Tensor | Sequence[int | Tensor]


class Phase:
    """A kernel and its arguments in each of several turns (layers of a model), by name."""

    def __init__(self, kernel: Kernel, names: str, turns: int, **values: Value) -> None:
        self.kernel = kernel
        self._column = {name: column for column, name in enumerate(names.split())}
        self._numbers = np.zeros((turns, len(self._column)), np.int64)
        self.set(**values)

    def set(self, **values: Value) -> None:
        """Arguments that are the same in all turns, or one for each. Tensors are kept alive by the caller."""
        for name, value in values.items():
            self._numbers[:, self._column[name]] = (
                [_number(each) for each in value] if isinstance(value, Sequence) else _number(value)
            )

    def set_at(self, turn: int, **values: int | Tensor) -> None:
        """Arguments of one turn."""
        for name, value in values.items():
            self._numbers[turn, self._column[name]] = _number(value)

    def at(self, turn: int) -> tuple[int, int]:
        """Addresses of the kernel and of its arguments in that turn; they stay while the phase lives."""
        return self.kernel.address, self._numbers[turn].ctypes.data


def _number(value: Any) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else int(value)


class Program:
    """Phases of all turns in the order in which they run; with each, whether all threads wait for one another after it.

    each: phases of a turn.
    """

    def __init__(self, phases: Sequence[tuple[Phase, bool]], turns: Iterable[int]) -> None:
        self.each = len(phases)
        rows = [(*phase.at(turn), waits) for turn in turns for phase, waits in phases]
        self._rows = np.array(rows, np.int64)

    def run(self, first: int, last: int, *, begin: int = 0, end: int = 0) -> None:
        """Turns before `last`, from phase `begin` of `first` on, and `end` phases of `last` itself."""
        run_phases(self._rows.ctypes.data, first * self.each + begin, last * self.each + end, work=1 << 62)
