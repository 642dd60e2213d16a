"""Measures decode steps of an engine by their rows, once for a model on a machine, and keeps the figures on disk.

A file is taken only if it says that it is of this model, dtype, device, number of threads and release of torch, and
holds times that can be; any other is measured again and written over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from flowinfer.stages.spec_verify.costs import StepTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowinfer.engine.engine import Engine
    from flowinfer.message import Ids

FORMAT = 1  # raised where the figures come to mean something else
REPEATS = 3
BUDGET_S = 3.0  # for all sizes: what is left unmeasured lies on the line of the last two
GROWTH = 4  # from size to size: times between two lie near a line
ROWS_EACH = 4  # of a sequence: its last token and three drafts
LONG = 1024  # tokens of context that attention's share is measured with
_LEAST_S = 1e-6


def step_table(engine: Engine, max_rows: int, folder: Path, *, captured: Sequence[int] = ()) -> StepTable:
    """Times of this engine's decode steps up to max_rows rows, from the folder or measured now (about BUDGET_S).

    captured: sizes that steps are padded to, where they run as graphs. Call while nothing else runs.
    """
    sizes = list(captured) or growing(max_rows)
    key = table_key(engine, sizes)
    file = folder / f"{key}.json"
    found = load_table(file, key)
    if found is None:
        found = measure(engine, sizes, key, staircase=bool(captured))
        save_table(file, found)
    return found


def guessed_table(engine: Engine, max_rows: int) -> StepTable:
    """What steps should take by what the engine learned of prefill: for when there is no time to measure."""
    rows = growing(max_rows)
    seconds = tuple(max(_LEAST_S, engine.cost.predict(count, count)) for count in rows)
    return StepTable(key="guessed", rows=tuple(rows), seconds=seconds, pair_s=engine.cost.coefficients[2])


def growing(most: int) -> list[int]:
    """1, GROWTH, GROWTH squared, ... and `most`."""
    sizes = [1]
    while sizes[-1] * GROWTH < most:
        sizes.append(sizes[-1] * GROWTH)
    return sizes if most == 1 else [*sizes, most]


def table_key(engine: Engine, sizes: Sequence[int]) -> str:
    """A digest of all that the times hang on and that can be known."""
    import torch

    device = engine.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    parts = (FORMAT, engine.layout.digest, str(engine.model.dtype), name, engine.ctx.threads, torch.__version__, *sizes)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def load_table(file: Path, key: str) -> StepTable | None:
    """The table in this file; None where it isn't there, is damaged, or is of something else."""
    try:
        table = msgspec.json.decode(file.read_bytes(), type=StepTable)
    except (OSError, msgspec.DecodeError):
        return None
    return table if table.key == key and table.usable else None


def save_table(file: Path, table: StepTable) -> None:
    """Writes the table, whole or not at all. A disk that takes none costs a measurement at the next start."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(table))
        partial.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def measure(engine: Engine, sizes: Sequence[int], key: str, *, staircase: bool) -> StepTable:
    """Median of REPEATS steps over each number of rows, while BUDGET_S lasts; at least over the two smallest sizes."""
    began = time.perf_counter()
    seconds: list[float] = []
    for rows in sizes:
        if len(seconds) > 1 and time.perf_counter() - began + seconds[-1] * GROWTH * (REPEATS + 1) > BUDGET_S:
            break
        seconds.append(_median_s(_steps(engine, rows, 0)))
    rows = min(sizes[len(seconds) - 1], 2 * ROWS_EACH)
    pairs = rows * LONG
    extra = _median_s(_steps(engine, rows, LONG)) - _median_s(_steps(engine, rows, 0))
    return StepTable(
        key=key,
        rows=tuple(sizes[: len(seconds)]),
        seconds=tuple(seconds),
        pair_s=max(0.0, extra / pairs),
        staircase=staircase,
    )


def _median_s(step: Callable[[], None]) -> float:
    step()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return max(_LEAST_S, median(times))


def _steps(engine: Engine, rows: int, context: int) -> Callable[[], None]:
    """A step over so many rows of random tokens, ROWS_EACH a sequence, behind `context` tokens; KV as it lies."""
    config, layout = engine.model.config, engine.layout
    counts: Ids = np.full(-(-rows // ROWS_EACH), min(ROWS_EACH, rows), np.int32)
    counts[-1] = rows - counts[:-1].sum()
    context = min(context, config.max_positions - ROWS_EACH)
    width = layout.blocks_for(context + ROWS_EACH)
    tokens = np.random.default_rng(rows).integers(0, config.vocab_size, rows).astype(np.int32)

    def step() -> None:
        blocks = engine.pool.allocate(min(width * len(counts), engine.pool.num_free))
        if not blocks:
            return
        tables = np.resize(np.array(blocks, np.int32), (len(counts), width))  # shared where there are too few
        engine.forward(tokens, counts, counts + context, tables)
        engine.pool.release(blocks)

    return step


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    return (re.search(r"model name\s*: (.*)", text) or ["", platform.processor()])[1]
