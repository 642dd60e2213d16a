"""Imports point one way, and what must start fast never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flowinfer

ROOT = Path(flowinfer.__file__).parent
# Lower layers come first; a module imports its own layer and those before it.
LAYERS = (
    ("errors", "units"),
    ("message",),
    ("codec",),
    ("channel",),
    ("engine.layout", "engine.formats"),
    ("stage",),
    ("spec",),
    ("graph.plan",),
    ("graph",),
    ("kernels", "observe"),
    ("engine", "cache", "transfer", "text"),
    ("stages",),
    ("runtime", "experiment"),
    ("serve",),
    ("testing", "fakes", "compare", "flow", "sim", "train", "bench"),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def level_of(module: str) -> int:
    parts = module.removeprefix("flowinfer").strip(".").split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in LEVEL:
            return LEVEL[".".join(parts[:length])]
    return len(LAYERS) if parts[0] == "__main__" else 0


def sources() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if "__pycache__" not in path.parts]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> list[str]:
    """Modules that are imported when the file is: not those inside functions or for type checkers."""
    found: list[str] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, (ast.If, ast.Try)) and "TYPE_CHECKING" not in ast.dump(getattr(node, "test", node)):
            found += imported(node)
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    ours = [name for name in imported(ast.parse(path.read_text())) if name.startswith("flowinfer.")]
    if module.startswith("flowinfer.kernels"):
        allowed = ("flowinfer.errors", "flowinfer.kernels")
        assert [name for name in ours if not name.startswith(allowed)] == []
    assert [name for name in ours if level_of(name) > level_of(module)] == []


def test_only_the_channel_imports_zmq() -> None:
    users = [path for path in sources() if any(n.split(".")[0] == "zmq" for n in imported(ast.parse(path.read_text())))]
    assert [str(path.relative_to(ROOT)) for path in users] == ["channel.py"]


@pytest.mark.parametrize(
    "module", ["flowinfer", "flowinfer.runtime.supervisor", "flowinfer.cli.run", "flowinfer.graph"]
)
def test_torch_stays_out_of(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "stages").glob("*/stage.py")), ids=lambda path: path.parent.name)
def test_stages_import_neither_torch_nor_the_engine_at_module_level(path: Path) -> None:
    code = f"import sys, {module_of(path)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
