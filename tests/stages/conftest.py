"""Models with windows and what services over them left on disk, for tests of what is replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from windowed import SHAPES, Watched, first_tokens, save_windowed

Models = Callable[[str], Path]
Stored = Callable[..., Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, Path] = {}

    def get(shape: str) -> Path:
        if shape not in made:
            made[shape] = save_windowed(tmp_path_factory.mktemp("v4"), *SHAPES[shape])
        return made[shape]

    return get


@pytest.fixture(scope="module")
def filled(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    made: dict[tuple[str, bool], Path] = {}

    def get(shape: str, approximate: bool) -> Path:
        key = (shape, approximate)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("kv")
            running = Watched(models(shape), made[key], "bounded" if approximate else "exact")
            running.ask(first_tokens(models(shape)), 2)
            running.stop()
        return made[key]

    return get


@pytest.fixture
def stored(filled: Callable[[str, bool], Path], tmp_path: Path) -> Stored:
    """A copy of what a service left on disk that had answered one prompt of some more than nine blocks."""

    def get(shape: str, mode: str = "exact") -> Path:
        return shutil.copytree(filled(shape, mode == "bounded"), tmp_path / f"{len(list(tmp_path.iterdir()))}")

    return get
