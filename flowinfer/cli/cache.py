"""`flowinfer cache`: looks at the disk tier, cleans it, carries it to another machine."""

from __future__ import annotations

from pathlib import Path

import click

from flowinfer.units import format_bytes, parse_bytes

DEFAULT = "~/.cache/flowinfer/kv"
_path = click.option("--path", default=DEFAULT, show_default=True, help="Folder of the disk tier.")
_cls = click.option("--class", "cls", help="Only blocks of this class.")
_tenant = click.option("--tenant", help="Only blocks of this tenant, as `stats` shows it.")


@click.group()
def cache() -> None:
    """Look at the KV blocks on disk, delete them, carry them elsewhere."""


@cache.command()
@_path
def stats(path: str) -> None:
    """Blocks and bytes by class and tenant."""
    from rich.console import Console
    from rich.table import Table

    from flowinfer.cache.disk.offline import summary

    found = summary(Path(path).expanduser())
    table = Table("class", "tenant", title=f"{path}: {_size(found.live)} wanted, {_size(found.allocated)} on disk")
    table.add_column("blocks", justify="right")
    table.add_column("size", justify="right")
    for row in sorted(found.usage, key=lambda row: -row.bytes):
        table.add_row(row.cls, row.tenant or "(none)", f"{row.blocks:,}", _size(row.bytes))
    Console().print(table)
    click.echo(f"{found.segments} segments")


@cache.command()
@_path
@_cls
@_tenant
def ls(path: str, cls: str | None, tenant: str | None) -> None:
    """One block a line: name, class, tenant, size, segment; those used longest ago first."""
    from flowinfer.cache.disk.offline import entries

    for entry in entries(Path(path).expanduser(), cls=cls, tenant=tenant):
        tenant_name = entry.tenant or "-"
        click.echo(f"{entry.name.hex()} {entry.cls} {tenant_name} {entry.length} {entry.segment}")


@cache.command()
@_path
@_cls
@_tenant
@click.option("--damaged", is_flag=True, help="Only blocks that fail their checksums.")
@click.option("--all", "everything", is_flag=True, help="All blocks.")
def rm(path: str, cls: str | None, tenant: str | None, damaged: bool, everything: bool) -> None:
    """Delete blocks. Refused while a service uses the folder."""
    from flowinfer.cache.disk.offline import remove

    if not (cls or tenant or damaged or everything):
        raise click.UsageError("Say which blocks: --class, --tenant, --damaged or --all.")
    count = remove(Path(path).expanduser(), cls=cls, tenant=tenant, damaged=damaged)
    click.echo(f"{count} blocks deleted")


@cache.command()
@_path
@click.pass_context
def verify(ctx: click.Context, path: str) -> None:
    """Read every block and check it. Exit code 1 where one is damaged."""
    from flowinfer.cache.disk.offline import verify as check

    damaged = 0
    for entry, cause in check(Path(path).expanduser()):
        damaged += 1
        click.echo(f"{entry.name.hex()} in segment {entry.segment}: {cause}")
    click.echo(f"{damaged} damaged blocks" if damaged else "all blocks are whole")
    ctx.exit(1 if damaged else 0)


@cache.command()
@_path
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def export(path: str, file: Path) -> None:
    """Write all whole blocks to a tar file."""
    from flowinfer.cache.disk.offline import export as write

    click.echo(f"{write(Path(path).expanduser(), file)} blocks written to {file}")


@cache.command(name="import")
@_path
@click.option("--size", default="20GiB", show_default=True, help="Bytes that the store may take.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(path: str, size: str, file: Path) -> None:
    """Take in the blocks of an export. Refused while a service uses the folder."""
    from flowinfer.cache.disk.offline import import_ as read

    click.echo(f"{read(Path(path).expanduser(), file, size=parse_bytes(size))} blocks taken in")


def _size(size: int) -> str:
    for unit in (2**30, 2**20, 2**10):
        if size >= unit:
            return f"{size / unit:.1f} {format_bytes(unit)[1:]}"
    return f"{size} B"
