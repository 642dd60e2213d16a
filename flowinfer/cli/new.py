"""`flowinfer new stage NAME`: writes the folder of a new stage, whose test passes as it stands."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

import click

from flowinfer.errors import FlowInferError

TEMPLATES = Path(__file__).parent / "new_stage"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@click.group()
def new() -> None:
    """Write the files of something new."""


@new.command()
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), default=".", help="The folder to put it in.")
def stage(name: str, into: Path) -> None:
    """Write a stage, its policy, test, README, and an overlay that puts it into a pipeline. NAME is as my-router."""
    folder = write_stage(name, into)
    for path in sorted(folder.iterdir()):
        click.echo(f"  {path}")
    click.echo(f"Next: flowinfer test {folder}")


def write_stage(name: str, into: Path) -> Path:
    """The folder, new. Raises FlowInferError for a name that no stage can have, or a folder that is there."""
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise FlowInferError(f"{name!r} can't be the name of a stage.", help="Use small letters, as in my-router.")
    folder = into / module
    if folder.exists():
        raise FlowInferError(f"{folder} is already there.", help="Choose another name, or move it away.")
    folder.mkdir(parents=True)
    words = {"kind": name, "cls": "".join(part.capitalize() for part in name.split("-")), "folder": str(folder)}
    for path in TEMPLATES.glob("*.txt"):
        text = Template(path.read_text("utf-8")).substitute(words)
        target = {"overlay.yaml": f"{name}.yaml", "stage_test.yaml": f"{name}_test.yaml"}.get(path.stem, path.stem)
        (folder / target).write_text(text, "utf-8")
    (folder / "__init__.py").touch()  # so that the files find each other by `from .policy import`
    return folder
