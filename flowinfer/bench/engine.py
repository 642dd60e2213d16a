"""Decode and prefill speed of the engine, beside what vLLM reached on the same kind of card and beside the roofline."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from flowinfer.bench import bars
from flowinfer.bench.kernels import PROFILED, Kernels, summed
from flowinfer.bench.rates import measure_rates
from flowinfer.bench.roofline import Rates, decode_ops, prefill_ops, roofline
from flowinfer.bench.service import Arrival, EngineService
from flowinfer.engine import hub
from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.named import CONFIGS, write_random

CHUNK = 32_768  # prompt tokens of a prefill step: four prompts of the prefill cell


@dataclass(frozen=True)
class Settings:
    """What to measure. context None: 1,024 tokens, 512 at batch 512. profile: batches whose kernels are listed."""

    config: str = "smollm2-135m"
    random_weights: bool = False
    batches: Sequence[int] = bars.BATCHES
    context: int | None = None
    steps: int = 128
    prefill: tuple[int, int] | None = bars.PREFILL
    device: str = "auto"
    dtype: str = "auto"
    profile: Sequence[int] = ()
    batch_invariant: bool = False
    weights: str = "checkpoint"
    kv_dtype: str = "auto"


@dataclass
class Cell:
    """One figure. value: ms a step, or tokens a second; bar: vLLM's; share: of the roofline's speed.

    host_ms: of the loop's own work a step; start_ms of it: to start the step on the device.
    """

    name: str
    value: float
    unit: str
    bar: float | None
    ratio: float | None
    roofline: float
    share: float
    host_ms: float | None = None
    start_ms: float | None = None
    spread_ms: float | None = None
    experts_touched: float | None = None
    kernels: list[tuple[str, float, float]] = field(default_factory=list)  # name, calls and microseconds a step


@dataclass
class Report:
    """All figures of one model on one device."""

    config: str
    device: str
    dtype: str
    date: str
    commit: str
    versions: dict[str, str]
    rates: Rates
    start_s: dict[str, float] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)


def run(settings: Settings, tell: Callable[[str], None] = print) -> Report:
    """Measures and returns all cells; tells each as it is known."""
    device = settings.device if settings.device != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if settings.random_weights:
            write_random(settings.config, path, positions=_longest(settings))
        else:
            path = hub.resolve(settings.config)
        config = hub.describe(path).config
        dtype = hub.describe(path).dtype(settings.dtype)
        rates = measure_rates(torch.device(device), getattr(torch, dtype))
        report = _report(settings, device, dtype, rates)
        tell(f"{settings.config} {dtype} on {report.device}: reads {rates.read / 1e12:.3g} TB/s, "
             f"multiplies at {rates.matmul / 1e12:.3g} TFLOP/s")  # fmt: skip
        began = time.perf_counter()
        service = _service(settings, str(path), config, device, dtype)
        report.start_s["load"] = time.perf_counter() - began
        service.answer([_prompt(config, 16, 0)], 2)
        report.start_s["first_answer"] = time.perf_counter() - began
        tell("start: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.start_s.items()))
        bench = _Bench(settings, service, config, rates, dtype, tell)
        if settings.prefill:
            report.cells.append(bench.prefill(*settings.prefill))
            tell(line(report.cells[-1]) + kernel_lines(report.cells[-1]))
        for batch in settings.batches:
            report.cells.append(bench.decode(batch))
            tell(line(report.cells[-1]) + kernel_lines(report.cells[-1]))
        service.close()
    return report


class _Bench:
    def __init__(
        self, settings: Settings, service: EngineService, config: ModelConfig, rates: Rates, dtype: str,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.settings, self.service, self.config, self.rates, self.tell = settings, service, config, rates, tell
        self.width = getattr(torch, dtype).itemsize
        self.fp8, self.fp8_kv = settings.weights == "fp8", settings.kv_dtype == "fp8"
        named = settings.random_weights or settings.config in CONFIGS
        self.known = settings.config if named and not (self.fp8 or self.fp8_kv) else ""  # the bars are of bfloat16

    def decode(self, batch: int) -> Cell:
        steps, context = self.settings.steps, context_of(self.settings, batch)
        slack = _slack(batch, context)
        prompts = [_prompt(self.config, context, i) for i in range(batch)]
        kernels = Kernels(steps + 4) if batch in self.settings.profile else None
        before = self._started_s()
        watch = None if kernels is None else lambda: kernels.watch(self._num_full(batch))
        arrivals = self.service.answer(prompts, steps + slack + 2 * PROFILED, watch=watch)
        times, waits = _full_steps(arrivals, batch, steps)
        seconds = (times[-1] - times[0]) / (len(times) - 1)
        host = seconds - (waits[-1] - waits[0]) / (len(waits) - 1)
        touched = self._touched()
        started = self._started_s() - before
        kinds = {"width": self.width, "fp8": self.fp8, "fp8_kv": self.fp8_kv}
        ops = decode_ops(self.config, batch, context + steps / 2, touched=touched, **kinds)
        bar = bars.DECODE_MS.get(self.known, {}).get(batch)
        bar = bar if context == bars.CONTEXT.get(batch, bars.DEFAULT_CONTEXT) else None
        limit = roofline(ops, self.rates)
        spread = float(np.diff(np.quantile(np.diff(times), (0.1, 0.9)))[0])
        return Cell(
            name=f"decode, {batch} x {context}", value=seconds * 1e3, unit="ms", bar=bar,
            ratio=bar / (seconds * 1e3) if bar else None, roofline=limit * 1e3, share=limit / seconds,
            host_ms=host * 1e3, start_ms=started / max(1, len(arrivals)) * 1e3, spread_ms=spread * 1e3,
            experts_touched=touched, kernels=kernels.found if kernels else [],
        )  # fmt: skip

    def _num_full(self, batch: int) -> int:
        return sum(arrival.num_sequences == batch for arrival in self.service.client.arrivals)

    def prefill(self, num: int, tokens: int) -> Cell:
        prompts = [_prompt(self.config, tokens, i) for i in range(num)]
        times = []
        for _ in range(3):
            began = time.perf_counter()
            self.service.answer(prompts, 1)
            times.append(time.perf_counter() - began)
        kernels = self._prefill_kernels(prompts) if self.settings.profile else []
        speed = num * tokens / statistics.median(times[1:])
        bar = bars.PREFILL_TOKENS_S.get(self.known) if (num, tokens) == bars.PREFILL else None
        ops = prefill_ops(self.config, num, tokens, width=self.width, fp8=self.fp8, fp8_kv=self.fp8_kv)
        limit = num * tokens / roofline(ops, self.rates)
        return Cell(
            name=f"prefill, {num} x {tokens}", value=speed, unit="tokens/s", bar=bar,
            ratio=speed / bar if bar else None, roofline=limit, share=speed / limit, kernels=kernels,
        )  # fmt: skip

    def _prefill_kernels(self, prompts: list[Any]) -> list[tuple[str, float, float]]:
        """Of all prompts; a step is all of them here."""
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.service.answer(prompts, 1)
        return summed(seen, 1)

    def _started_s(self) -> float:
        overlap = self.service.decode.overlap
        return overlap.started_s if overlap is not None else 0.0

    def _touched(self) -> float | None:
        overlap = self.service.decode.overlap
        counts = overlap.graphs.experts_touched() if overlap is not None else []
        return statistics.fmean(counts) if counts else None


def context_of(settings: Settings, batch: int) -> int:
    """Tokens of context in the decode cell of this batch."""
    return settings.context or bars.CONTEXT.get(batch, bars.DEFAULT_CONTEXT)


def _full_steps(arrivals: list[Arrival], batch: int, steps: int) -> tuple[list[float], list[float]]:
    """Times and waits of `steps` steps in a row that gave every sequence a token, and of the one before them.

    Not the first two such steps: they are looked at late, behind the last prompts.
    """
    full = [arrival for arrival in arrivals if arrival.num_sequences == batch][2 : steps + 3]
    if len(full) < 2:
        raise RuntimeError(f"no two steps ran all {batch} sequences together: is max_batch or the KV memory too small?")
    return [arrival.at for arrival in full], [arrival.waited_s for arrival in full]


def _prompt(config: ModelConfig, tokens: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(3, config.vocab_size, tokens).astype(np.int32)


def _service(settings: Settings, path: str, config: ModelConfig, device: str, dtype: str) -> EngineService:
    batches = settings.batches
    needs = [(batch, _total(settings, batch)) for batch in batches]
    needs += [(settings.prefill[0], settings.prefill[1] + 64)] if settings.prefill else []
    blocks = max((num * (-(-tokens // 64) + 2) for num, tokens in needs), default=8)
    return EngineService(
        path, device=device, dtype=dtype, num_blocks=blocks, max_batch=max([*batches, 8]),
        max_tokens=min(_longest(settings), config.max_positions), chunk=CHUNK,
        batch_invariant=settings.batch_invariant, weights=settings.weights,
        kv_dtype=settings.kv_dtype,
    )  # fmt: skip


def _slack(batch: int, context: int) -> int:
    """Steps beside those that count: the first sequences begin while others are still computed."""
    return 8 + 2 * -(-batch * context // CHUNK)


def _total(settings: Settings, batch: int) -> int:
    """Tokens of a sequence of a decode cell, from first to last."""
    context = context_of(settings, batch)
    return context + settings.steps + _slack(batch, context) + 2 * PROFILED


def _longest(settings: Settings) -> int:
    prompts = [settings.prefill[1] + 64] if settings.prefill else [64]
    return max([*prompts, *(_total(settings, batch) for batch in settings.batches)])


def _report(settings: Settings, device: str, dtype: str, rates: Rates) -> Report:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(settings.config, name, dtype, now, _commit(), versions, rates)


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except OSError:
        return ""
    return found.stdout.strip()


def kernel_lines(cell: Cell, most: int = 18) -> str:
    """The kernels of a cell that take longest, one a row."""
    return "".join(f"\n    {us:9.1f} us {calls:6.1f} x  {name[:90]}" for name, calls, us in cell.kernels[:most])


def line(cell: Cell) -> str:
    """A cell as a row of the table."""
    value = f"{cell.value:,.2f}" if cell.unit == "ms" else f"{cell.value:,.0f}"
    bar = "" if cell.bar is None else f"{cell.bar:,.2f}" if cell.unit == "ms" else f"{cell.bar:,.0f}"
    ratio = "" if cell.ratio is None else f"{cell.ratio:.2f}x"
    limit = f"{cell.roofline:,.2f}" if cell.unit == "ms" else f"{cell.roofline:,.0f}"
    host = "" if cell.host_ms is None else f"{cell.host_ms:.3f}"
    return (
        f"{cell.name:22} {value:>10} {cell.unit:9} vLLM {bar:>8} {ratio:>6}  roofline {limit:>8} {cell.share:>4.0%}"
        f"  host ms {host}"
    )


def table(report: Report) -> str:
    """All cells, one a row."""
    head = f"{report.config} {report.dtype} on {report.device}; bars: {bars.SOURCE}"
    return "\n".join([head, *(line(cell) for cell in report.cells)])


def to_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(asdict(report), indent=1) + "\n"
