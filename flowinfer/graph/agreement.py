"""Do the stages agree with each other: models, dtypes, settings, neighbours, and how messages are shared out?"""

from __future__ import annotations

from itertools import combinations

from flowinfer.engine.formats import numbers_of
from flowinfer.errors import Mark
from flowinfer.graph.facets import FacetFlow
from flowinfer.graph.model import Graph, StageNode, Wire
from flowinfer.graph.plan import API
from flowinfer.message import Sequence
from flowinfer.spec.hints import did_you_mean
from flowinfer.stage import Conflict, ModelUse


def check_dispatch(graph: Graph, flow: FacetFlow) -> None:
    """Buckets and prefixes must have been set before, hashing needs a field, credit is in the consumer's unit."""
    for wire in graph.wires:
        _check_key(graph, wire)
        _check_unit(graph, wire)
        has = flow.of(wire)
        if wire.options.by("bucket") and has is not None:
            _check_buckets(graph, flow, wire, has)
        if wire.options.by("prefix") and has is not None and "prefix" not in has:
            mark = graph.document.value_mark(*wire.path, "dispatch")
            message = f"`{wire.name}` is shared out by cached prefix, but its messages have none."
            graph.problem("FI321", message, mark, "Put a cache-lookup before it, or remove `dispatch: prefix`.")


def _check_key(graph: Graph, wire: Wire) -> None:
    key, document = wire.options.key, graph.document
    if wire.options.dispatch != "hash":
        if key is not None:
            mark = document.mark(*wire.path, "key")
            graph.problem("FI217", "`key` has no meaning without `dispatch: hash`.", mark, "Add it, or remove the key.")
    elif key is None:
        mark, help = document.value_mark(*wire.path, "dispatch"), "Add `key: cache_salt`, or another field."
        graph.problem("FI217", f"`{wire.name}` hashes, but doesn't say what.", mark, help)
    elif wire.out and key not in wire.out.message.__struct_fields__:
        mark, fields = document.value_mark(*wire.path, "key"), wire.out.message.__struct_fields__
        kind = wire.out.message.__name__
        graph.problem("FI317", f"{kind} has no field `{key}`.", mark, did_you_mean(key, fields))


def _check_unit(graph: Graph, wire: Wire) -> None:
    counted = unit_of(graph, wire)
    if wire.options.unit and counted and wire.options.unit != counted:
        mark = graph.document.value_mark(*wire.path, "unit")
        message = f"`{wire.target}` counts {counted} there, not {wire.options.unit}."
        note = (graph.stages[wire.target].mark, f"`{wire.target}` is here")
        graph.problem("FI413", message, mark, "Remove `unit`: the consumer knows.", [note])


def unit_of(graph: Graph, wire: Wire) -> str | None:
    """What the consumer counts its credit in."""
    contract = graph.stages[wire.target].contract
    return contract.units.get(wire.into.name, "messages") if contract and wire.into else None


def _check_buckets(graph: Graph, flow: FacetFlow, wire: Wire, has: frozenset[str]) -> None:
    mark = graph.document.value_mark(*wire.path, "dispatch")
    if "bucket" not in has:
        message = f"`{wire.name}` is shared out by bucket, but its messages have none."
        graph.problem("FI315", message, mark, "Put a bucket-route before it, or remove `dispatch: bucket`.")
        return
    lanes = {lanes_of(stage) for stage in flow.sources(wire, "bucket")}
    if len(lanes) > 1:
        notes: list[tuple[Mark | None, str]] = [
            (stage.mark, f"`{stage.name}` has {', '.join(lanes_of(stage)) or 'no buckets'}")
            for stage in flow.sources(wire, "bucket")
        ]
        graph.problem("FI316", f"The buckets before `{wire.name}` differ from path to path.", mark, notes=notes)
    elif lanes == {()}:
        message = f"The stage that sets the bucket for `{wire.name}` doesn't say which there are."
        graph.problem("FI316", message, mark, "Its settings need a map `buckets` with a name for each.")


def lanes_of(stage: StageNode) -> tuple[str, ...]:
    """Bucket names of a stage that adds the facet `bucket`."""
    buckets = getattr(stage.config, "buckets", ())
    return tuple(str(name) for name in buckets) if isinstance(buckets, (dict, list, tuple)) else ()


def check_conflicts(graph: Graph) -> None:
    """Settings that can't stand beside a setting of another stage."""
    for stage in graph.stages.values():
        for conflict in stage.contract.conflicts if stage.contract else ():
            for other in graph.stages.values():
                if other is not stage and other.kind == conflict.kind:
                    _check_conflict(graph, stage, other, conflict)


def _check_conflict(graph: Graph, stage: StageNode, other: StageNode, conflict: Conflict) -> None:
    value = getattr(other.config, conflict.other, None)
    if other.config is None or not any(value == wrong and type(value) is type(wrong) for wrong in conflict.values):
        return
    mine = graph.document.value_mark("stages", stage.name, "with", conflict.setting)
    theirs = graph.document.value_mark("stages", other.name, "with", conflict.other)
    setting = getattr(stage.config, conflict.setting, None)
    pair = f"`{conflict.setting}: {setting}` of `{stage.name}` and `{conflict.other}: {value}` of `{other.name}`"
    message = f"{pair} exclude each other."
    note = (theirs, f"`{conflict.other}: {value}`")
    graph.problem("FI318", message, mine, conflict.reason, [note])


def check_fits(graph: Graph) -> None:
    """Settings that must suit the model of another stage."""
    for stage in graph.stages.values():
        for fit in stage.contract.fits if stage.contract else ():
            for other in graph.stages.values():
                use = other.contract.model if other.contract and other.kind == fit.kind else None
                if use and use.model and "${" not in use.model and (found := fit.check(use.model)):
                    mark = graph.document.value_mark("stages", stage.name, "with", fit.setting)
                    note = (
                        graph.document.value_mark("stages", other.name, "with", "model"),
                        f"the model is {use.model}",
                    )
                    path = f"stages.{stage.name}.with.{fit.setting}"
                    way = f" That is --set {path}={fit.instead}." if fit.instead else ""
                    graph.problem("FI325", found[0], mark, found[1] + way, [note])


def check_beside(graph: Graph) -> set[frozenset[str]]:
    """Stages that work only in the same process as another kind. Returns the pairs that are apart."""
    apart: set[frozenset[str]] = set()
    for stage in graph.stages.values():
        for kind in sorted(stage.contract.beside) if stage.contract and stage.worker else ():
            others = [other for other in graph.stages.values() if other.kind == kind and other is not stage]
            unknown = any(other.cls is None and other.name != API for other in graph.stages.values())
            if not unknown and not any(other.worker in (stage.worker, None) for other in others):
                pair = frozenset({stage.name, *(other.name for other in others[:1])})
                if pair not in apart:
                    _report_beside(graph, stage, kind, others)
                apart.add(pair)
    return apart


def _report_beside(graph: Graph, stage: StageNode, kind: str, others: list[StageNode]) -> None:
    if not others:
        message = f"{stage} works beside a {kind}, and the graph has none."
        graph.problem("FI407", message, stage.mark, f"Add a stage with `use: {kind}`.")
        return
    mover, anchor = stage, others[0]
    if graph.document.root.at("stages", stage.name, "place") and not graph.document.root.at(
        "stages", anchor.name, "place"
    ):
        mover, anchor = anchor, stage  # what was placed by hand stays
    message = f"{mover} must run in the worker of {anchor}, not in `{mover.worker}`."
    notes: list[tuple[Mark | None, str]] = [(anchor.mark, f"`{anchor.name}` runs in `{anchor.worker}`")]
    mark = graph.document.mark("stages", mover.name, "place")
    graph.problem("FI407", message, mark, f"Write `place: {{with: {anchor.name}}}` in `{mover.name}`.", notes)


def _loaded(graph: Graph) -> list[tuple[StageNode, ModelUse]]:
    uses = [(stage, stage.contract.model) for stage in graph.stages.values() if stage.contract and stage.contract.model]
    return [(stage, use) for stage, use in uses if use and use.weights and "${" not in use.model]


def check_models(graph: Graph) -> None:
    """One engine a model and worker; keys and values only between equal models."""
    handed = {(a.name, b.name) for (a, _), (b, _) in combinations(_loaded(graph), 2) if _hands_over(graph, a, b)}
    said: set[tuple[ModelUse, ModelUse]] = set()  # three stages that disagree are one mistake
    for (a, mine), (b, theirs) in combinations(_loaded(graph), 2):
        if (mine, theirs) in said:
            continue
        if (a.name, b.name) in handed and _kv_of(mine) != _kv_of(theirs):
            _report_ends(graph, a, b, mine, theirs)
        elif a.worker == b.worker and a.worker and mine.model == theirs.model and mine != theirs:
            _report_engines(graph, a, b, mine, theirs)
        else:
            continue
        said.add((mine, theirs))


def _kv_of(use: ModelUse) -> tuple[str, str, str, str]:
    """What the keys and values hang on; whether a copy of quantized weights is kept isn't part of it."""
    return use.model, use.dtype, numbers_of(use.packed), use.kv


def _hands_over(graph: Graph, a: StageNode, b: StageNode) -> bool:
    """True when sequences with their keys and values go from one to the other."""

    def carries(wire: Wire) -> bool:
        return wire.out is None or issubclass(wire.out.message, Sequence)

    return b.name in graph.reach(a.name, follow=carries) or a.name in graph.reach(b.name, follow=carries)


def _report_ends(graph: Graph, a: StageNode, b: StageNode, mine: ModelUse, theirs: ModelUse) -> None:
    setting = _differing(mine, theirs)
    message = f"`{b.name}` reads the keys and values of `{a.name}`, but {_differ(a, b, mine, theirs)}."
    _report(graph, "FI319", message, a, b, setting)


def _report_engines(graph: Graph, a: StageNode, b: StageNode, mine: ModelUse, theirs: ModelUse) -> None:
    message = f"`{a.name}` and `{b.name}` share {mine.model} in `{a.worker}`, but {_differ(a, b, mine, theirs)}."
    _report(graph, "FI408", message, a, b, _differing(mine, theirs))


def _differing(mine: ModelUse, theirs: ModelUse) -> str:
    if mine.model != theirs.model:
        return "model"
    return "dtype" if mine.dtype != theirs.dtype else "kv_dtype" if mine.kv != theirs.kv else "weights"


def _differ(a: StageNode, b: StageNode, mine: ModelUse, theirs: ModelUse) -> str:
    if mine.model != theirs.model:
        return f"one runs {mine.model} and the other {theirs.model}"
    if mine.dtype != theirs.dtype:
        return f"one runs in {mine.dtype} and the other in {theirs.dtype}"
    if mine.kv != theirs.kv:
        return f"one has `kv_dtype: {mine.kv}` and the other `kv_dtype: {theirs.kv}`"
    return f"one has `weights: {mine.packed}` and the other `weights: {theirs.packed}`"


def _report(graph: Graph, code: str, message: str, a: StageNode, b: StageNode, setting: str) -> None:
    mark, other = (
        s.inherited.get(setting) or graph.document.value_mark("stages", s.name, "with", setting) for s in (b, a)
    )
    graph.problem(code, message, mark, f"Write the same `{setting}` in both.", [(other, f"`{a.name}` is set here")])
