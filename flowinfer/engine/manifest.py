"""What a model folder holds and whether it's still that: checksums written at the pull, checked cheaply later."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "flowinfer.json"
HEAD = "draft.safetensors"  # a draft head beside the weights: it changes no result
_SAMPLES = 256  # of 1 KiB per weight file: hits every layer of a fine-tune, costs about 2 ms
_SAMPLE_BYTES = 1024


def write(folder: Path, *, source: str) -> None:
    """Hashes every file of folder into its manifest."""
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in _files(folder)}
    _save(folder, {"source": source, "files": files})


def is_intact(folder: Path, *, full: bool = False) -> bool:
    """Whether the files are those of the manifest: by size and time, or by content with full.

    A file that was touched or copied but has the same content is accepted, and its new time noted.
    """
    manifest = read(folder)
    if manifest is None:
        return False
    entries = manifest["files"]
    changed = [
        name for name, entry in entries.items() if full or _stat(folder / name) != (entry["size"], entry["mtime_ns"])
    ]
    for name in changed:
        if not (folder / name).is_file() or (fresh := _entry(folder / name))["sha256"] != entries[name]["sha256"]:
            return False
        entries[name] = fresh
    if changed and os.access(folder, os.W_OK):
        _save(folder, manifest)
    return True


def matches(folder: Path) -> bool:
    """Whether the content of every file is the manifest's; touches nothing."""
    manifest = read(folder)
    return manifest is not None and all(
        (folder / name).is_file() and sha256(folder / name) == entry["sha256"]
        for name, entry in manifest["files"].items()
    )


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none that can be read."""
    try:
        manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def digest(folder: Path) -> str:
    """Names the weights and the configuration: 16 hex characters, the same wherever the folder lies.

    From the manifest's checksums, else from config.json and samples of each weight file.
    """
    manifest = read(folder)
    if manifest is not None:
        parts = [(name, e["sha256"]) for name, e in sorted(manifest["files"].items()) if _shapes_results(name)]
    else:
        parts = [(path.name, _sampled(path)) for path in _files(folder) if _shapes_results(path.name)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """Hex digest of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shapes_results(name: str) -> bool:
    return name == "config.json" or (name.endswith(".safetensors") and name != HEAD)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != NAME)


def _entry(path: Path) -> dict[str, Any]:
    size, mtime_ns = path.stat().st_size, path.stat().st_mtime_ns
    return {"sha256": sha256(path), "size": size, "mtime_ns": mtime_ns}


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(i * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def _save(folder: Path, manifest: dict[str, Any]) -> None:
    temporary = folder / f".{NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    temporary.replace(folder / NAME)
