"""`flowinfer cache`: looks at the tiers that outlive a service, cleans them, carries them to another machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flowinfer.units import format_bytes, format_duration, parse_bytes

if TYPE_CHECKING:
    from flowinfer.cache.objects.client import Client

Command = TypeVar("Command", bound=Callable[..., Any])
_cls = click.option("--class", "cls", help="Only blocks of this class.")
_tenant = click.option("--tenant", help="Only blocks of this tenant, as `stats` shows it.")


def _where(command: Command) -> Command:
    """Options that name a tier."""
    for option in (
        click.option("--profile", default="default", show_default=True, help="Of the credentials file."),
        click.option("--credentials", type=click.Path(dir_okay=False), help="File, as ~/.aws/credentials, for a URL."),
        click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Of the store, for a URL."),
        click.option("--path", help="Folder of a disk tier, or URL of an object tier.  [default: the cache's folder]"),
    ):
        command = option(command)
    return command


@click.group()
def cache() -> None:
    """Look at the KV blocks on disk or in an object store, delete them, carry them elsewhere.

    A disk tier is named by its folder, an object tier by its URL (s3://bucket/prefix); credentials come from the
    environment or from a file.
    """


@cache.command()
@_where
def stats(path: str | None, **store: Any) -> None:
    """Blocks and bytes by class and tenant."""
    from rich.console import Console
    from rich.table import Table

    usage, title, note = _usage_of_objects(path, **store) if _is_url(path) else _usage_of_disk(_folder(path))
    table = Table("class", "tenant")
    table.add_column("blocks", justify="right")
    table.add_column("size", justify="right")
    for cls, tenant, blocks, size in sorted(usage, key=lambda row: -row[3]):
        table.add_row(cls, tenant or "(none)", f"{blocks:,}", _size(size))
    click.echo(f"{title}, {note}")
    Console().print(table)


def _usage_of_disk(folder: Path) -> tuple[list[tuple[str, str, int, int]], str, str]:
    from flowinfer.cache.disk.offline import summary

    found = summary(folder)
    title = f"{folder}: {_size(found.live)} wanted, {_size(found.allocated)} on disk"
    return [tuple(row) for row in found.usage], title, f"{found.segments} segments"  # type: ignore[misc]


def _usage_of_objects(path: str | None, **store: Any) -> tuple[list[tuple[str, str, int, int]], str, str]:
    from flowinfer.cache.objects.offline import stored

    objects = stored(_client(path, **store))
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for one in objects:
        row = sums[one.named.cls, one.named.tenant]
        row[0], row[1] = row[0] + 1, row[1] + one.size
    usage = [(cls, tenant, blocks, size) for (cls, tenant), (blocks, size) in sums.items()]
    total = _size(sum(one.size for one in objects))
    return usage, f"{path}: {total}", f"{len({one.named.namespace for one in objects})} namespaces"


@cache.command()
@_where
@_cls
@_tenant
def ls(path: str | None, cls: str | None, tenant: str | None, **store: Any) -> None:
    """One block a line: name, class, tenant, bytes, retention, segment or namespace; longest unused first."""
    for name, *words in _list(path, cls, tenant, **store):
        click.echo(" ".join([name.hex(), *words]))


def _list(path: str | None, cls: str | None, tenant: str | None, **store: Any) -> Iterable[tuple[Any, ...]]:
    if _is_url(path):
        from flowinfer.cache.objects.offline import stored

        for one in stored(_client(path, **store), cls=cls, tenant=tenant):
            n = one.named
            yield n.name, n.cls, n.tenant or "-", str(one.size), format_duration(n.keep), n.namespace
        return
    from flowinfer.cache.disk.offline import entries

    for e in entries(_folder(path), cls=cls, tenant=tenant):
        yield e.name, e.cls, e.tenant or "-", str(e.length), format_duration(e.keep), str(e.segment)


@cache.command()
@_where
@_cls
@_tenant
@click.option("--damaged", is_flag=True, help="Only blocks that fail their checksums.")
@click.option("--all", "everything", is_flag=True, help="All blocks.")
def rm(path: str | None, cls: str | None, tenant: str | None, damaged: bool, everything: bool, **store: Any) -> None:
    """Delete blocks. On disk, refused while a service uses the folder."""
    if not (cls or tenant or damaged or everything):
        raise click.UsageError("Say which blocks: --class, --tenant, --damaged or --all.")
    if _is_url(path):
        from flowinfer.cache.objects import offline as objects

        count = objects.remove(_client(path, **store), cls=cls, tenant=tenant, damaged=damaged)
    else:
        from flowinfer.cache.disk import offline as disk

        count = disk.remove(_folder(path), cls=cls, tenant=tenant, damaged=damaged)
    click.echo(f"{count} blocks deleted")


@cache.command()
@_where
@click.pass_context
def verify(ctx: click.Context, /, path: str | None, **store: Any) -> None:
    """Read every block and check it. Exit code 1 where one is damaged."""
    damaged = 0
    for where, cause in _damaged(path, **store):
        damaged += 1
        click.echo(f"{where}: {cause}")
    click.echo(f"{damaged} damaged blocks" if damaged else "all blocks are whole")
    ctx.exit(1 if damaged else 0)


def _damaged(path: str | None, **store: Any) -> Iterable[tuple[str, str]]:
    if _is_url(path):
        from flowinfer.cache.objects import offline as objects

        yield from ((one.named.key, cause) for one, cause in objects.verify(_client(path, **store)))
        return
    from flowinfer.cache.disk import offline as disk

    for entry, cause in disk.verify(_folder(path)):
        yield f"{entry.name.hex()} in segment {entry.segment}", cause


@cache.command()
@_where
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def export(path: str | None, file: Path, **store: Any) -> None:
    """Write all whole blocks to a tar file; encrypted ones stay so."""
    if _is_url(path):
        from flowinfer.cache.objects import offline as objects

        count = objects.export(_client(path, **store), file)
    else:
        from flowinfer.cache.disk import offline as disk

        count = disk.export(_folder(path), file)
    click.echo(f"{count} blocks written to {file}")


@cache.command(name="import")
@_where
@click.option("--size", default="20GiB", show_default=True, help="Bytes that a disk tier may take.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(path: str | None, size: str, file: Path, **store: Any) -> None:
    """Take in the blocks of an export. On disk, refused while a service uses the folder."""
    if _is_url(path):
        from flowinfer.cache.objects import offline as objects

        count = objects.import_(_client(path, **store), file)
    else:
        from flowinfer.cache.disk import offline as disk

        count = disk.import_(_folder(path), file, size=parse_bytes(size))
    click.echo(f"{count} blocks taken in")


def _is_url(path: str | None) -> bool:
    return path is not None and "://" in path


def _folder(path: str | None) -> Path:
    from flowinfer.cache.tiers import default_folder

    return Path(path).expanduser() if path else default_folder()


def _client(path: str | None, options: tuple[str, ...], credentials: str | None, profile: str) -> Client:
    from flowinfer.cache.objects.client import Client
    from flowinfer.cache.tiers import ObjectTierConfig

    assert path is not None, "a URL"
    named = dict(option.partition("=")[::2] for option in options)
    try:
        config = ObjectTierConfig(url=path, options=named)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return Client(path, options=config.options, credentials_file=credentials, profile=profile)


def _size(size: int) -> str:
    for unit in (2**30, 2**20, 2**10):
        if size >= unit:
            return f"{size / unit:.1f} {format_bytes(unit)[1:]}"
    return f"{size} B"
