"""`flowinfer plan`: what a file would change, by stage, edge and setting, each with its class, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowinfer.errors import FlowInferError, Problem, SpecError

if TYPE_CHECKING:
    from flowinfer.graph.diff import Change
    from flowinfer.graph.plan import Plan
    from flowinfer.runtime.rewire.protocol import Reply

COLORS = {"live": "green", "warm": "cyan", "cold": "yellow", "refused": "red"}


@click.command()
@click.argument("file", type=click.Path())
@click.argument("other", required=False, type=click.Path())
@click.option("-o", "--overlay", "overlays", multiple=True, metavar="FILE", help="Lay this file over the new one.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set one value of the new file.")
@click.option("--allow-local", is_flag=True, help="Let `use: ./file.py:Class` run code of local files.")
@click.option("--service", default="", metavar="NAME", help="Of several running services, this one.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON.")
def plan(
    file: str,
    other: str | None,
    overlays: tuple[str, ...],
    sets: tuple[str, ...],
    allow_local: bool,
    service: str,
    as_json: bool,
) -> None:
    """Show what FILE would change in the running service, or what OTHER changes in FILE; change nothing.

    -o and --set belong to the file that is new. Exit codes: 0 it can be done, 1 it is refused.
    """
    from flowinfer.cli.rewire import ask_service, find_service, load_source, source_of
    from flowinfer.runtime.rewire.protocol import Request

    old = None if other is None else load_source(source_of(file, (), (), allow_local))
    folder = find_service(service, file) if old is None else None
    try:
        new = load_source(source_of(other or file, overlays, sets, allow_local))
    except SpecError as error:
        _refuse(error, as_json)
        return
    if old is not None:
        reply = compare_plans(old, new)
    else:
        assert folder is not None
        reply = ask_service(folder, Request(do="plan", plan=new))
    click.echo(_as_json(reply) if as_json else render(reply))
    if any(change.kind == "refused" for change in reply.changes):
        click.get_current_context().exit(1)


def _refuse(error: SpecError, as_json: bool) -> None:
    """A file with mistakes: types that don't fit, facets that are missing, settings that no stage has."""
    if as_json:
        changes = [
            {"path": str(p.mark or ""), "before": None, "after": None, "kind": "refused", "how": _words(p)}
            for p in error.problems
        ]
        click.echo(json.dumps({"changes": changes, "kept": [], "memory_bytes": 0, "gap": "none"}, indent=2))
    else:
        from flowinfer.cli import print_error

        print_error(error)
        click.echo(f"{click.style('refused', fg=COLORS['refused'], bold=True)}  the file can't run; nothing changes.")
    click.get_current_context().exit(1)


def _words(problem: Problem) -> str:
    return f"{problem.code}: {problem.message} {problem.help}".strip()


def compare_plans(old: Plan, new: Plan) -> Reply:
    """What `new` changes in `old`, were that running on this machine."""
    from flowinfer.graph.diff import compare
    from flowinfer.runtime.arenas import model_layouts
    from flowinfer.runtime.footprint import beside, estimate, refusal
    from flowinfer.runtime.loading import LoadStage
    from flowinfer.runtime.rewire.protocol import Reply

    load = LoadStage(Path(new.file).parent, new.allow_local or old.allow_local)
    diff = compare(old, new, load)
    changes = diff.changes
    try:
        model_layouts(new, load)
    except FlowInferError as error:
        changes = (*changes, refusal(new, error))
    cold = diff.kind == "cold"
    return Reply(
        last=True,
        changes=changes,
        kept=diff.kept,
        memory_bytes=sum(estimate(new, worker, load) for worker in beside(diff)) if not cold else 0,
        gap="as long as a start takes, after open requests have ended" if cold else "none",
    )


def render(reply: Reply) -> str:
    """The changes as a table, with what they cost."""
    if not reply.changes:
        return "Nothing differs."
    rows = [_row(change) for change in reply.changes]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = []
    for change, (kind, path, values) in zip(reply.changes, rows, strict=True):
        word = click.style(kind.ljust(widths[0]), fg=COLORS[kind], bold=True)
        lines += [f"{word}  {path.ljust(widths[1])}  {values}", f"{'':{widths[0]}}    {change.how}"]
    lines += [f"kept     {line}" for line in reply.kept]
    if any(change.kind == "refused" for change in reply.changes):
        return "\n".join([*lines, "", "refused: nothing would change"])
    return "\n".join([*lines, "", f"memory peak: {_memory(reply)}; gap for new requests: {reply.gap}"])


def _memory(reply: Reply) -> str:
    now = f" than the {_mib(reply.resident_bytes)} of now" if reply.resident_bytes else ""
    return f"about {_mib(reply.memory_bytes)} more{now} while both run" if reply.memory_bytes else "as now"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _row(change: Change) -> tuple[str, str, str]:
    return change.kind, change.path, f"{_short(change.before)} -> {_short(change.after)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _as_json(reply: Reply) -> str:
    import msgspec

    keys = ("changes", "kept", "memory_bytes", "resident_bytes", "gap")
    return msgspec.json.format(msgspec.json.encode({key: getattr(reply, key) for key in keys}), indent=2).decode()
