"""Every error that a person can meet: what went wrong, where, and the way out. Imports nothing of the project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class FlowInferError(Exception):
    """Base of all errors raised on purpose. The command line prints them without a traceback."""

    def __init__(self, message: str, *, help: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return f"{self.message} {self.help}".strip()


class Mark(NamedTuple):
    """A place in a file; line and column count from 1, as editors do."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One mistake in a pipeline file. `code` is looked up by `flowinfer explain CODE`."""

    code: str
    message: str
    mark: Mark | None = None
    help: str = ""
    notes: tuple[tuple[Mark | None, str], ...] = field(default=())

    def __str__(self) -> str:
        where = f"{self.mark}: " if self.mark else ""
        return f"{where}{self.code}: {self.message}" + (f" {self.help}" if self.help else "")


class SpecError(FlowInferError):
    """All mistakes that were found in a pipeline file, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class ModelError(FlowInferError):
    """A model that can't be found, read or run here."""


class StageError(FlowInferError):
    """A stage that can't start or broke; names the stage and, where known, its place in the file."""

    def __init__(self, stage: str, message: str, *, mark: Mark | None = None, help: str = "") -> None:
        super().__init__(f"stage {stage!r}" + (f" ({mark})" if mark else "") + f": {message}", help=help)
        self.stage = stage
        self.mark = mark


class KernelUnsupported(FlowInferError):
    """An op that this device or build lacks; names the missing feature and what would do."""


class TransportError(FlowInferError):
    """A queue that can't be opened, or a peer that doesn't speak our protocol."""


class RequestError(FlowInferError):
    """A request that is refused or that failed; becomes an API error of this HTTP status.

    `param` names the field at fault, `code` is a stable word for programs, `retry_after_s` tells when to come again.
    """

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
