"""`flowinfer bench`: measures parts of the service by themselves. What is printed here decides nothing elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowinfer.units import format_duration, parse_duration

if TYPE_CHECKING:
    from rich.table import Table

    from flowinfer.sim.admission import Admitted
    from flowinfer.sim.cache_bench import Outcome
    from flowinfer.sim.routing import Routed
    from flowinfer.sim.trace import Trace


@click.group()
def bench() -> None:
    """Measure parts of the service by themselves."""


def _sizes(ctx: click.Context, param: click.Parameter, text: str) -> list[float]:
    try:
        return [float(part[:-1]) / 100 if part.endswith("%") else float(int(part)) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} must be shares or blocks, as in 1%,10%,5000.") from error


def _expiry(ctx: click.Context, param: click.Parameter, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@bench.command()
@click.option("--trace", "file", required=True, type=click.Path(exists=True, dir_okay=False), help="JSON lines.")
@click.option("--block", default=512, show_default=True, type=click.IntRange(1), help="Tokens of a block.")
@click.option("--sizes", default="1%,5%,10%,25%", show_default=True, callback=_sizes, help="Blocks or working set.")
@click.option("--expiry", default="5m", show_default=True, callback=_expiry, help="Time of the sliding expiry.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1), help="Compare dispatch over so many.")
@click.option("--load", default=0.8, show_default=True, help="How busy these would be without a cache.")
@click.option("--json", "out", type=click.Path(dir_okay=False), help="Write the figures to this file too.")
def cache(file: str, block: int, sizes: list[float], expiry: float, workers: int, load: float, out: str | None) -> None:
    """Replay a request trace through the cache at several sizes; needs no model and no accelerator.

    The trace is in Mooncake's format: timestamp (ms), input_length, output_length, hash_ids. A size under the longest
    prompt is raised to it. With more than one worker, the ways to share prompts out are compared too, each worker with
    an equal part of the last size.
    """
    from rich.console import Console

    from flowinfer.sim.admission import compare_admissions
    from flowinfer.sim.cache_bench import compare_evictions, num_blocks_of, with_expiry, without_limit
    from flowinfer.sim.routing import WAYS, route
    from flowinfer.sim.trace import read_trace

    trace = read_trace(file, block)
    outcomes = [without_limit(trace), with_expiry(trace, expiry, f"expiry {format_duration(expiry)}")]
    outcomes += compare_evictions(trace, sizes)
    click.echo(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.num_blocks:,} blocks of {block} tokens, "
        f"{trace.working_set:,} different"
    )
    Console().print(_table(outcomes))
    each = max(trace.longest, num_blocks_of(trace, sizes[-1]) // workers)
    tier_sizes = [num_blocks_of(trace, size) for size in sizes]
    admitted = compare_admissions(trace, tier_sizes[0], tier_sizes)
    Console().print("\nWritten to a tier below a pool of the first size", _admission_table(trace, admitted), sep="\n")
    routed = [route(trace, way, workers, each, load) for way in WAYS] if workers > 1 else []
    if routed:
        Console().print(f"\n{workers} workers of {each:,} blocks", _routing_table(routed), sep="\n")
    if out:
        figures = {
            "trace": trace.name,
            "block_tokens": block,
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "writing": [asdict(one) for one in admitted],
            "dispatch": [asdict(one) for one in routed],
        }
        Path(out).write_text(json.dumps(figures, indent=1) + "\n")


@bench.command()
@click.option("--config", default="smollm2-135m", show_default=True, help="Named shape, model, folder or config.json.")
@click.option("--random-weights", is_flag=True, help="Make the weights up: speed doesn't depend on them.")
@click.option("--batch", default="", help="Decode batches, as in 1,8,32; 0 for none. [default: 1,8,32,128,256,512]")
@click.option("--context", type=click.IntRange(1), help="Tokens before the first step. [default: 1024; 512 at 512]")
@click.option("--steps", default=128, show_default=True, type=click.IntRange(2), help="Decode steps of a cell.")
@click.option("--prefill", default="", help="Prompts and tokens of each; 0 for none. [default: 8x8192]")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda:0 or auto.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, or auto for the model's own.")
@click.option("--weights", default="checkpoint", show_default=True, help="As stages have it: fp8, int8, int4, ...")
@click.option("--kv-dtype", default="auto", show_default=True, help="Of keys and values: auto or fp8.")
@click.option("--profile", default="", help="List the kernels of these batches, and of prefill, as in 1,32.")
@click.option("--batch-invariant", is_flag=True, help="In the mode in which a batch changes nothing.")
@click.option("--json", "json_", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here too.")
def engine(json_: Path | None, **settings: Any) -> None:
    """Decode and prefill speed of the engine by itself, beside its roofline here and what vLLM reached on an H200.

    Tokens go through the stages that serve them and arrive on the host. `python -m flowinfer.bench` is the same where
    only torch, triton, numpy, msgspec, pydantic and pyyaml are installed.
    """
    from flowinfer.bench.__main__ import measure

    measure(json=json_, **settings)


def _table(outcomes: list[Outcome]) -> Table:
    from rich.table import Table

    table = Table("policy", box=None)
    for heading in ("size", "of all", "hits", "hit rate", "written", "gap closed"):
        table.add_column(heading, justify="right")
    for o in outcomes:
        table.add_row(
            o.policy,
            f"{o.num_blocks:,}" if o.num_blocks else "",
            f"{o.share:.1%}" if o.share and o.num_blocks else "",
            f"{o.hits:,}",
            f"{o.hit_rate:.2%}",
            f"{o.written:,}" if o.written is not None else "",
            f"{o.gap_closed:.1%}" if o.gap_closed is not None else "",
        )
    return table


def _admission_table(trace: Trace, admitted: list[Admitted]) -> Table:
    from rich.table import Table

    table = Table("write", box=None)
    for heading in ("size", "of all", "hit rate", "in the pool", "written"):
        table.add_column(heading, justify="right")
    for a in admitted:
        rate, pool = a.hits / max(1, trace.num_blocks), a.pool_hits / max(1, trace.num_blocks)
        table.add_row(a.write, f"{a.num_blocks:,}", f"{a.share:.1%}", f"{rate:.2%}", f"{pool:.2%}", f"{a.written:,}")
    return table


def _routing_table(routed: list[Routed]) -> Table:
    from rich.table import Table

    table = Table("dispatch", box=None)
    for heading in ("hit rate", "busiest / mean", "mean wait", "95 %", "of short ones"):
        table.add_column(heading, justify="right")
    for r in routed:
        waits = (f"{wait:.2f} s" for wait in (r.wait_mean_s, r.wait_p95_s, r.wait_short_s))
        table.add_row(r.way, f"{r.hit_rate:.2%}", f"{r.balance:.2f}", *waits)
    return table
