"""`flowinfer test`: runs the test files beside pipelines, and the Python tests in a stage's folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowinfer.errors import FlowInferError

if TYPE_CHECKING:
    from flowinfer.testing import Outcome


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--url", help="Run against this running service instead of in this process.")
@click.option("--real", is_flag=True, help="Run over true processes: real workers, sockets and kill -9.")
def test(paths: tuple[Path, ...], url: str | None, real: bool) -> None:
    """Runs test files (*_test.yaml), or those beside a pipeline, or all in a folder (default: pipelines).

    Faults, mocks and cuts run in virtual time, in milliseconds; with --real in true time, over true processes.

    In a folder that holds test_*.py, as that of a stage, those are run by pytest, without plugins.
    Exit code 1 when a case fails.
    """
    from rich.console import Console

    if url and real:
        raise click.UsageError("Give either --url or --real.")
    console = Console(highlight=False, soft_wrap=True)
    num_failed = num_run = num_broken = 0
    for folder in [path for path in paths if path.is_dir() and any(path.glob("test_*.py"))]:
        num_broken += not _pytest(folder)
    for path in _files(paths or (Path("pipelines"),)):
        console.print(str(path), style="bold")
        for outcome in _outcomes(path, url, real):
            num_run += 1
            num_failed += bool(outcome.problems)
            console.print("  [red]failed[/]" if outcome.problems else "  [green]passed[/]", outcome.name)
            for problem in outcome.problems:
                console.print(f"         {problem}", markup=False)
    only_python = not num_run and any(path.is_dir() and any(path.glob("test_*.py")) for path in paths)
    if not only_python:
        console.print(f"{num_run - num_failed} passed, {num_failed} failed")
    sys.exit(1 if num_failed or num_broken or not (num_run or only_python) else 0)


def _outcomes(path: Path, url: str | None, real: bool) -> Iterator[Outcome]:
    from flowinfer.testing import run_inline, run_over_http, run_real

    if url:
        yield from run_over_http(path, url)
        return
    yield from run_real(path) if real else run_inline(path)


def _pytest(folder: Path) -> bool:
    """Whether the Python tests of a folder pass; pytest prints how they went.

    Without plugins, whose import alone may take seconds; for tests that need one, run pytest itself.
    """
    if importlib.util.find_spec("pytest") is None:
        raise FlowInferError(f"{folder} has tests in Python, which pytest runs.", help="pip install pytest")
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", str(folder)]
    return (
        subprocess.run(command, check=False, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}).returncode == 0
    )


def _files(paths: tuple[Path, ...]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(path.rglob("*_test.yaml"))
        elif path.stem.endswith("_test"):
            found.append(path)
        else:
            found += [path.with_name(f"{path.stem}_test.yaml"), *sorted(path.parent.glob(f"{path.stem}_*_test.yaml"))]
    return found
