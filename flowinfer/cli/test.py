"""`flowinfer test`: runs the test files beside pipelines."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--url", help="Run against this running service instead of in this process.")
def test(paths: tuple[Path, ...], url: str | None) -> None:
    """Runs test files (*_test.yaml), or those beside a pipeline, or all in a folder (default: pipelines).

    Exit code 1 when a case fails.
    """
    from rich.console import Console

    from flowinfer.testing import run_inline, run_over_http

    console = Console(highlight=False, soft_wrap=True)
    num_failed = num_run = 0
    for path in _files(paths or (Path("pipelines"),)):
        console.print(str(path), style="bold")
        for outcome in run_over_http(path, url) if url else run_inline(path):
            num_run += 1
            num_failed += bool(outcome.problems)
            console.print("  [red]failed[/]" if outcome.problems else "  [green]passed[/]", outcome.case.name)
            for problem in outcome.problems:
                console.print(f"         {problem}", markup=False)
    console.print(f"{num_run - num_failed} passed, {num_failed} failed")
    sys.exit(1 if num_failed or not num_run else 0)


def _files(paths: tuple[Path, ...]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(path.rglob("*_test.yaml"))
        elif path.stem.endswith("_test"):
            found.append(path)
        else:
            found.append(path.with_name(f"{path.stem}_test.yaml"))
    return found
