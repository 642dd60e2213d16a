"""What the built-in stages could do for a graph that lacks something. Asked only to word a suggestion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flowinfer.errors import FlowInferError
from flowinfer.spec.registry import builtin_kinds, load_stage
from flowinfer.stage import Contract, Port, Stage, ports


def _classes() -> Iterator[tuple[str, type[Stage]]]:
    for kind in builtin_kinds():
        try:
            yield kind, load_stage(kind)
        except FlowInferError:
            continue


def converters(outs: Iterable[Port], ins: Iterable[Port]) -> list[str]:
    """Kinds that take one of `outs` and give something that one of `ins` takes."""
    outs, ins = tuple(outs), tuple(ins)
    found = []
    for kind, stage in _classes():
        takes, gives = ports(stage)
        if _fits(outs, takes) and _fits(gives, ins):
            found.append(kind)
    return found


def _fits(outs: Iterable[Port], ins: Iterable[Port]) -> bool:
    ins = tuple(ins)
    return any(issubclass(out.message, into.message) for out in outs for into in ins)


def adders(facet: str) -> list[str]:
    """Kinds whose default settings add this facet."""
    return [kind for kind, stage in _classes() if facet in _default_contract(stage).adds]


def _default_contract(stage: type[Stage]) -> Contract:
    try:
        return stage.Config.model_construct().contract()
    except Exception:  # a stage whose contract can't be known without settings isn't suggested
        return Contract()
