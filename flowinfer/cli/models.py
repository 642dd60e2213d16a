"""`flowinfer models`: fetch, list and describe models. What is printed here decides nothing elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from flowinfer.cache.disk.records import record_size
from flowinfer.engine import heads, hub
from flowinfer.engine.layout import KVLayout
from flowinfer.engine.sources import ALIASES, BUNDLED
from flowinfer.errors import ModelError
from flowinfer.units import format_bytes, format_tokens


@click.group()
def models() -> None:
    """Fetch, list and describe models."""


@models.command()
@click.argument("model")
@click.option(
    "--verify", is_flag=True, help="Read every byte of a model that is there, and fetch it again if it's damaged."
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def pull(model: str, verify: bool, quiet: bool) -> None:
    """Fetch MODEL (an alias such as smollm2-135m, or a hub id) into the cache."""
    start = time.perf_counter()
    if verify and not hub.verify(model):
        click.echo(f"{model} is missing or damaged: fetching it.", err=True)
        hub.discard(model)
    path = hub.pull(model, progress=not quiet)
    click.echo(f"{model} is in {path} ({time.perf_counter() - start:.1f} s)")


@models.command("list")
def list_() -> None:
    """Models of the package and in the cache, and aliases that can be pulled."""
    table = Table("model", "architecture", "parameters", "context", "on disk", box=None)
    found = BUNDLED | hub.pulled()
    for name, path in found.items():
        info = hub.describe(path)
        table.add_row(
            name, info.architecture, f"{info.num_params / 1e6:,.0f} M", format_tokens(info.context_length), _size(path)
        )
    for name in ALIASES:
        if name not in found:
            table.add_row(name, "not pulled yet", "", "", "")
    Console().print(table)


@models.command()
@click.argument("model")
def show(model: str) -> None:
    """Sizes, dtype, KV and digest of MODEL."""
    info = hub.describe(hub.resolve(model))
    config, layout = info.config, info.layout()
    rows = {
        "folder": info.path,
        "architecture": info.architecture,
        "parameters": f"{info.num_params / 1e6:,.1f} M",
        "layers": config.num_layers,
        "heads": f"{config.num_heads}, {config.num_kv_heads} for keys and values, of {config.head_dim}",
        "experts": f"{config.num_experts}, {config.experts_per_token} a token"
        if config.num_experts
        else "none (dense)",
        "vocabulary": config.vocab_size,
        "context": f"{info.context_length} tokens",
        "dtype": info.dtype(),
        "stored as": _stored(info),
        "ends with": ", ".join(map(str, info.eos_token_ids)),
        "KV of a block": f"{format_bytes(layout.block_bytes)} for {layout.block_tokens} tokens",
        "KV of a token": f"{layout.token_bytes:g} B" + _by_group(layout),
        "KV of a request": ", ".join(_of_request(layout, n) for n in sorted({1, 1024, info.context_length})),
        "KV on disk": _on_disk(layout),
        "draft head": heads.describe(model),
        "digest": info.digest,
    }
    for name, value in rows.items():
        click.echo(f"{name:>15}  {value}")


def _of_request(layout: KVLayout, num_tokens: int) -> str:
    size = layout.request_bytes(num_tokens) / 2**20
    return f"{size:,.1f} MiB of {num_tokens:,} token{'s' if num_tokens > 1 else ''}"


def _on_disk(layout: KVLayout) -> str:
    """What the disk tier writes of a token, headers and padding included."""
    entries, whole, state = (
        record_size(size) for size in (layout.part_bytes("entries"), layout.block_bytes, layout.part_bytes("state"))
    )
    text = f"{entries / layout.block_tokens:g} B of a token"
    if not layout.window:
        return text
    more = f"{state / 1024:,.0f} KiB of each end of a prompt or an answer"
    return f"{text}, {more}; with every window it would be {whole / layout.block_tokens:g} B of a token"


def _stored(info: hub.ModelInfo) -> str:
    """Weights by the format in the files; those in FP8 and FP4 become the dtype as they are loaded."""
    try:
        stored = hub.stored(info.path, info.config)
    except ModelError as error:
        return error.message
    return ", ".join(f"{kind} {count / 1e6:,.1f} M" for kind, count in stored.items()) or "nothing: they are made up"


def _by_group(layout: KVLayout) -> str:
    """Where a model keeps several kinds of KV: how much of a token's bytes each is."""
    parts = [f"{name} {size / layout.block_tokens:g}" for name, size in layout.group_bytes().items()]
    return f": {', '.join(parts)}" if parts else ""


def _size(path: Path) -> str:
    return f"{sum(p.stat().st_size for p in path.rglob('*') if p.is_file()) / 2**20:,.0f} MiB"
