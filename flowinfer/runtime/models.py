"""Fetches the models that a plan's stages name and this machine lacks, before anything is started."""

from __future__ import annotations

from pathlib import Path

from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import API, Plan
from flowinfer.runtime.loading import LoadStage, make_config, stage_error


def fetch_models(plan: Plan) -> None:
    """Shows a progress bar on stderr, nothing where every model is there. Raises StageError."""
    load = LoadStage(Path(plan.file).parent, plan.allow_local)
    seen: set[str] = set()
    for stage in plan.stages.values():
        model = None if stage.name == API else make_config(load(stage), stage).contract().model
        if model is None or model.model in seen:
            continue
        seen.add(model.model)
        from flowinfer.engine import hub  # here: a graph without a model needs nothing of the engine

        try:
            hub.resolve(model.model, pull=True)
        except FlowInferError as error:
            raise stage_error(stage, error) from error
