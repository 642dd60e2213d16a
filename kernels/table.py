"""Writes kernels/README.md: what each op needs, what runs instead, and the error that says so. No op is imported.

Run: python -m flowinfer.kernels.table
"""

from __future__ import annotations

import ast
from pathlib import Path

from flowinfer.kernels.arch import FEATURES, TABLE, Needs, missing

FOLDER = Path(__file__).parent
FILE = FOLDER / "README.md"
_OLD = (7, 5)  # a card that is too old for every kernel

_HEAD = """# Kernels

An op a folder: `__init__.py` has the checked public function, `reference.py` (or the same file) the op in plain torch,
`triton.py` the kernel, `cpu.py` loops for a CPU. Tests are in `tests/kernels`; they run in Triton's interpreter, and on
a card with `FLOWINFER_TEST_DEVICE=cuda:0`. `tests/bench/bench_ops.py` times every op and prints its share of the
roofline.

What runs is decided once, when a model is loaded, from this table (`arch.py`); `flowinfer doctor` prints it for the
devices of a machine. Where an op can't run, the one named here runs instead; whoever calls it all the same gets the
error. This file is written by `python -m flowinfer.kernels.table`.

| op | what it does | needs | instead | error on an older card |
|---|---|---|---|---|
"""


def folders() -> list[str]:
    """Names of all ops that have a folder."""
    return sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def render() -> str:
    """The text of the file."""
    return _HEAD + "".join(_row(needs) for needs in sorted(TABLE, key=lambda needs: needs.op))


def _row(needs: Needs) -> str:
    lacks = missing(needs, _OLD, needs.dtypes[0])
    error = f"KernelUnsupported: {needs.op} on cuda:0 needs {lacks}." if lacks else "none: it runs everywhere"
    cells = (f"`{needs.op}`", _does(needs.op), wants(needs), needs.fallback, error)
    return "| " + " | ".join(cells) + " |\n"


def wants(needs: Needs) -> str:
    """Everything that an op needs, in words."""
    dtypes = " or ".join(needs.dtypes)
    loops = "; on a CPU numba, for loops of its own" if needs.loops else ""
    if needs.anywhere:
        return f"torch; {dtypes}{loops}"
    if needs.tiles:
        return f"a CPU with {FEATURES[needs.tiles]}; numba; {dtypes}"
    least = ".".join(map(str, needs.capability))
    card = f"a CUDA device of capability {needs.capability[0]}.x" if needs.alone else f"CUDA capability {least}"
    parts = (
        card,
        "Triton" if needs.triton else "",
        "nvidia-cutlass-dsl" if needs.cute else "",
        f"torch.{needs.torch_op}" if needs.torch_op else "",
        dtypes,
    )
    return "; ".join(part for part in parts if part) + loops


def _does(op: str) -> str:
    """The first sentence of the op's folder."""
    file = FOLDER / op / "__init__.py"
    if not file.exists():
        return "torch's own"
    text = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return " ".join(text.split()).removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
