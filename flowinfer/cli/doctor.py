"""`flowinfer doctor`: the devices of this machine, and for each kernel whether it runs there or what runs instead."""

from __future__ import annotations

import click


@click.command()
@click.option("--dtype", default="bfloat16", show_default=True, help="Of weights and KV.")
def doctor(dtype: str) -> None:
    """Show devices, and what each kernel needs of them.

    The choice is made once, when a model is loaded; this prints the same table.
    """
    from rich.console import Console
    from rich.table import Table

    from flowinfer.kernels import arch

    console = Console()
    for name, device in _devices():
        table = Table("kernel", "here", title=f"{device}: {name}", title_justify="left", box=None)
        for needs in arch.TABLE:
            lacks = arch.missing(needs, arch.capability_of(device), dtype)
            table.add_row(needs.op, f"needs {lacks}; instead: {needs.fallback}" if lacks else "runs")
        console.print(table)


def _devices() -> list[tuple[str, str]]:
    """(what it is, torch's name for it)."""
    import platform

    import torch

    gpus = [(torch.cuda.get_device_name(i), f"cuda:{i}") for i in range(torch.cuda.device_count())]
    return [(platform.processor() or platform.machine(), "cpu"), *gpus]
