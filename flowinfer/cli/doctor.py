"""`flowinfer doctor`: the devices of this machine, and for each kernel whether it runs there or what runs instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from flowinfer.kernels.arch import Needs


@click.command()
@click.option("--dtype", default="bfloat16", show_default=True, help="Of weights and KV.")
def doctor(dtype: str) -> None:
    """Show devices, what each kernel needs of them, and in which formats weights run there.

    The choice is made once, when a model is loaded; this prints the same table.
    """
    from rich.console import Console
    from rich.table import Table

    from flowinfer.kernels import arch

    console = Console()
    for name, device in _devices():
        table = Table("kernel", "here", title=f"{device}: {name}", title_justify="left", box=None)
        for needs in arch.TABLE:
            table.add_row(needs.op, _state(needs, device, dtype))
        for row in _weights(device, arch.capability_of(device), dtype):
            table.add_row(*row)
        console.print(table)


def _state(needs: Needs, device: str, dtype: str) -> str:
    """Whether an op runs on the device, and what it lacks."""
    from flowinfer.kernels import arch, compiled

    lacks = arch.missing(needs, arch.capability_of(device), dtype)
    if device == "cpu" and needs.loops:
        loops = compiled.missing()
        return f"compiled loops need {loops}; instead: plain torch" if loops else "runs, in compiled loops"
    if needs.tiles and not lacks and not compiled.pairs_pay():
        return f"would run; faster with AMX: {needs.fallback}"
    return f"needs {lacks}; instead: {needs.fallback}" if lacks else "runs"


def _weights(device: str, capability: tuple[int, int] | None, dtype: str) -> list[tuple[str, str]]:
    """What becomes of weights that a checkpoint or a setting has in fewer bits."""
    from flowinfer.engine.formats import FP8, PACKED, lacks
    from flowinfer.engine.models.quantized import has_packed_products

    rows = [
        (f"{kind.upper()} weights", f"{lacks(kind, device, capability)}; instead: {dtype}, made as they are loaded")
        for kind in PACKED
    ]
    for bits in (8, 4):
        runs = "runs" if has_packed_products(bits) else f"this torch has no packed product; instead: one in {dtype}"
        rows.append((f"weights: int{bits}", runs if device == "cpu" else "for CPUs; refused"))
    needs = lacks(FP8, device, capability, dense=True) or ("" if dtype == "bfloat16" else "it is for bfloat16")
    rows.append((f"weights: {FP8}", f"{needs}; refused" if needs else "runs, but for DeepSeek-V4"))
    return rows


def _devices() -> list[tuple[str, str]]:
    """(what it is, torch's name for it)."""
    import platform

    import torch

    gpus = [(torch.cuda.get_device_name(i), f"cuda:{i}") for i in range(torch.cuda.device_count())]
    return [(platform.processor() or platform.machine(), "cpu"), *gpus]
