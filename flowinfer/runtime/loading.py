"""Finds the class of a stage and makes its settings. Opens nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from flowinfer.errors import FlowInferError, Mark, StageError
from flowinfer.graph.plan import API, StagePlan
from flowinfer.stage import Stage, StageConfig

Loader = Callable[[StagePlan], type[Stage]]
GATEWAY = "flowinfer.serve.gateway:Gateway"  # by name: the runtime doesn't know HTTP


def load_class(kind: str, *, base: Path | None = None, allow_local: bool = False) -> type[Stage]:
    """The class of a kind: a built-in or plug-in name, `module.path:Class`, or with allow_local `./file.py:Class`.

    base is the folder that local files are relative to. Raises FlowInferError when there is no such stage.
    """
    module, _, name = (GATEWAY if kind == API else kind).partition(":")
    if name and not module.endswith(".py"):
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type) and issubclass(found, Stage):
            return found
        raise FlowInferError(f"{kind} isn't a stage.")
    from flowinfer.spec import registry

    return registry.load_stage(kind, base=base, allow_local=allow_local)


class LoadStage:
    """Finds stage classes for the stages of one plan."""

    def __init__(self, base: Path, allow_local: bool) -> None:
        self._base, self._allow_local = base, allow_local

    def __call__(self, stage: StagePlan) -> type[Stage]:
        return load_class(stage.kind, base=self._base, allow_local=self._allow_local)


def make_config(cls: type[Stage], plan: StagePlan) -> StageConfig:
    """The settings of a stage. Raises StageError with its place in the file."""
    try:
        return cls.Config.model_validate(plan.config)
    except ValidationError as error:
        raise stage_error(plan, error) from error


def stage_error(plan: StagePlan, cause: BaseException) -> StageError:
    """The cause as an error that names the stage and its place; a StageError stays as it is."""
    if isinstance(cause, StageError):
        return cause
    if isinstance(cause, FlowInferError):
        return StageError(plan.name, cause.message, mark=parse_mark(plan.mark), help=cause.help)
    return StageError(plan.name, f"{type(cause).__name__}: {cause}", mark=parse_mark(plan.mark))


def parse_mark(mark: str) -> Mark | None:
    """The Mark of `file:line:column`, None for anything else."""
    parts = mark.rsplit(":", 2)
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return Mark(parts[0], int(parts[1]), int(parts[2]))
