"""`flowinfer stages`: the kinds there are, and one kind with its ports, facets and settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flowinfer.errors import FlowInferError
from flowinfer.spec.docs import attribute_docs
from flowinfer.spec.registry import builtin_kinds, installed_kinds, load_stage
from flowinfer.stage import Contract, Port, Stage, ports


def list_stages() -> None:
    """A table of all kinds: what each takes, gives and does."""
    table = Table("stage", "takes", "gives", "what it does", box=box.SIMPLE_HEAD, pad_edge=False)
    for kind in dict.fromkeys([*builtin_kinds(), *installed_kinds()]):
        try:
            stage = load_stage(kind)
            table.add_row(f"[bold]{kind}[/]", *(_types(side) for side in ports(stage)), _first_sentence(stage))
        except FlowInferError as error:
            table.add_row(kind, "", "", f"[red]{error.message}[/]")
    console = Console(highlight=False)
    console.print(table)
    console.print("`flowinfer stages NAME` shows one with its settings.", style="dim")


def show_stage(use: str, allow_local: bool) -> None:
    """One kind in full. Raises StageNotFound."""
    stage = load_stage(use, base=Path.cwd(), allow_local=allow_local)
    console = Console(highlight=False)
    console.print(f"[bold]{use}[/]  {inspect.cleandoc(stage.__doc__ or '')}\n", soft_wrap=False)
    inputs, outputs = ports(stage)
    contract = _contract(stage)
    for line in [*_inputs(inputs, contract), *_outputs(outputs, contract), *_rest(contract)]:
        console.print(line)
    console.print(_settings(stage) if stage.Config.model_fields else "\nIt has no settings.")


def _types(side: Iterable[Port]) -> str:
    return ", ".join(dict.fromkeys(port.message.__name__ for port in side)) or "-"


def _first_sentence(stage: type[Stage]) -> str:
    text = " ".join(inspect.cleandoc(stage.__doc__ or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".") + "." if text else ""


def _contract(stage: type[Stage]) -> Contract:
    """With default settings; a stage whose settings have no defaults tells the rest once it's in a file."""
    try:
        return stage.Config.model_construct().contract()
    except Exception:
        return Contract()


def _inputs(inputs: Iterable[Port], contract: Contract) -> list[str]:
    lines = []
    for port in inputs:
        needs = contract.needs.get(port.name)
        extra = [f"needs {', '.join(sorted(needs))}"] if needs else []
        extra += [f"credit in {contract.units[port.name]}"] if port.name in contract.units else []
        lines.append(_port("input", port, extra))
    return lines


def _outputs(outputs: Iterable[Port], contract: Contract) -> list[str]:
    extra = [f"adds {', '.join(sorted(contract.adds))}"] if contract.adds else []
    extra += [f"drops {', '.join(sorted(contract.drops))}"] if contract.drops else []
    return [_port("output", port, extra) for port in outputs]


def _port(word: str, port: Port, extra: list[str]) -> str:
    local = ["never leaves its worker"] if port.message.local else []
    details = f"  [dim]{'; '.join([*extra, *local])}[/]" if extra or local else ""
    return f"  {word:<7} {port.name}: [cyan]{port.message.__name__}[/]{details}"


def _rest(contract: Contract) -> list[str]:
    beside = f"  beside  {', '.join(sorted(contract.beside))} [dim](in the same worker)[/]"
    conflicts = [
        f"  refuses {c.setting} with {c.kind}'s {c.other} {' or '.join(map(str, c.values))}: {c.reason}"
        for c in contract.conflicts
    ]
    return ([beside] if contract.beside else []) + conflicts


def _settings(stage: type[Stage]) -> Table:
    table = Table("setting", "type", "default", "meaning", box=box.SIMPLE_HEAD, pad_edge=False)
    docs = attribute_docs(stage.Config)
    defaults = _defaults(stage)
    schema = stage.Config.model_json_schema(by_alias=True)
    for name, field in stage.Config.model_fields.items():
        key = field.alias or name
        shape = _shape(schema["properties"][key], schema)
        default = "[bold]required[/]" if field.is_required() else _value(defaults.get(key, field.default))
        if (key, field.default) == ("model", ""):
            default = "the graph's"
        table.add_row(f"[bold]{key}[/]", shape, default, docs.get(name, ""))
    return table


def _defaults(stage: type[Stage]) -> dict[str, Any]:
    """In the notation of files: 50ms rather than 0.05."""
    config = stage.Config.model_construct()
    try:
        return config.model_dump(mode="json", by_alias=True, warnings=False)
    except Exception:
        return {}


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) or "{}"
    if isinstance(value, str):
        return value or '""'
    return "-" if value is None else json.dumps(value, default=str)


def _shape(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """The type as people say it: a unit where there is one, the choices where there are few."""
    if "$ref" in field:
        target = schema.get("$defs", {}).get(field["$ref"].rsplit("/", 1)[-1], {})
        return "map of " + ", ".join(target["properties"]) if "properties" in target else _shape(target, schema)
    if "unit" in field:
        return str(field["unit"])
    if "enum" in field or "const" in field:
        return " | ".join(str(choice) for choice in field.get("enum", [field.get("const")]))
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_shape(member, schema) for member in field["anyOf"]))
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        return f"map of {_shape(inner, schema)}" if isinstance(inner, dict) else "map"
    if field.get("type") == "array":
        return f"list of {_shape(field['items'], schema)}" if isinstance(field.get("items"), dict) else "list"
    names = {"string": "text", "integer": "number", "number": "number", "boolean": "true | false", "null": "none"}
    return _bounded(names.get(str(field.get("type")), "any"), field)


def _bounded(name: str, field: dict[str, Any]) -> str:
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is None and high is None:
        return name
    return f"{name} {low if low is not None else ''}..{high if high is not None else ''}"
