"""KV from one process into the pool of another on one GPU, by cuda_ipc: every byte, and the rate beside a plain copy's.

PYTHONPATH=. python tests/bench/bench_cuda_ipc.py [--peer] [--json FILE]

4,000 tokens of two models, to blocks in random order. Rates count bytes read and written, of copies that wait in line
on the device, as median of rounds; `share` is that of a plain contiguous copy of as many bytes on the same card in the
same run. `one_ms`: from `push` to the word that all blocks are there, with an idle card; `plain_one_ms`: a plain copy
and the wait for it. --peer: the taker's pool lies on a second GPU, and so does the target of the plain copy. Ends with
1 where a byte differs or the share is below the bar.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from flowinfer.engine.layout import KVLayout
from flowinfer.kernels.copy_blocks import copy_blocks
from flowinfer.transfer import cuda_ipc
from flowinfer.transfer.cuda_device import CudaDevice
from flowinfer.transfer.transport import Push, Written

OWN, PEER = "cuda:0", "cuda:1"
TOKENS = 4_000
BAR = 0.8
LAYOUTS = {
    "qwen3-8b": KVLayout(model="bench", dtype="bfloat16", num_layers=36, num_kv_heads=8, head_dim=128),
    "smollm2-135m": KVLayout(model="bench", dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64),
}
SETS = {"qwen3-8b": 4, "smollm2-135m": 10}  # of blocks, used in turns, so that no cache holds them
QUEUED, ROUNDS = 20, 9
PAD = 32 << 20


class Context:
    """As much of a stage's context as transports use."""

    def __init__(self) -> None:
        self.results: queue.SimpleQueue[tuple[Callable[[Any], object], Any]] = queue.SimpleQueue()

    def submit(self, fn: Callable[[], Any], then: Callable[[Any], object], *, request: str = "") -> None:
        def work() -> None:
            try:
                result = fn()
            except Exception as error:
                result = error
            self.results.put((then, result))

        threading.Thread(target=work).start()

    def turn(self, wait_s: float = 0.0) -> None:
        try:
            then, result = self.results.get(timeout=wait_s) if wait_s else self.results.get_nowait()
        except queue.Empty:
            return
        then(result)


def engine(kv: torch.Tensor, layout: KVLayout) -> Any:
    """As much of an engine as transports use."""
    return SimpleNamespace(kv=kv, layout=layout, ctx=Context(), model=SimpleNamespace(device=kv.device))


def arena(layout: KVLayout, num_blocks: int, device: str) -> torch.Tensor:
    """Zeros, in the middle of an allocation, as a caching allocator may place them."""
    size = num_blocks * layout.block_bytes
    torch.empty(size + 2 * PAD, dtype=torch.uint8, device=device)
    pad = torch.empty(PAD, dtype=torch.uint8, device=device)
    kv = torch.zeros((num_blocks, *layout.block_shape), dtype=torch.bfloat16, device=device)
    del pad
    return kv


def fill(kv: torch.Tensor, seed: int) -> None:
    """Bytes that another process can make again."""
    generator = torch.Generator(device=kv.device).manual_seed(seed)
    kv.view(-1).view(torch.uint8).random_(0, 256, generator=generator)


def taker(pipe: Connection, name: str, num_blocks: int, device: str) -> None:
    """The process whose pool is written to; answers what it is asked."""
    torch.cuda.set_device(device)
    layout = LAYOUTS[name]
    kv = arena(layout, num_blocks, device)
    receiver = cuda_ipc.make_receiver(engine(kv, layout))
    while True:
        what, *arguments = pipe.recv()
        if what == "address":
            pipe.send(receiver.address())
        elif what == "busy":  # our device still writes to the blocks when they are set aside
            torch.cuda._sleep(200_000_000)
            kv.fill_(7.0)
            pipe.send(receiver.address())
        elif what == "differing":
            targets, sources, seed, rest = arguments
            torch.cuda.synchronize()
            expected = torch.empty_like(kv)
            fill(expected, seed)
            wanted = torch.full_like(kv, rest)
            wanted[targets] = expected[sources]
            same = (kv.view(torch.int16) == wanted.view(torch.int16)).flatten(1).all(1)
            pipe.send(int((~same).sum()))


def milliseconds(stream: torch.cuda.Stream, calls: Iterable[Callable[[], object]]) -> float:
    """Of one of these calls on the device, which begins when all are queued."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls = list(calls)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        start.record(stream)
        for call in calls:
            call()
        end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / len(calls)


def median_ms(stream: torch.cuda.Stream, calls: Callable[[int], Callable[[], object]]) -> float:
    """Of a call; calls(i) is the i-th."""
    rounds = [milliseconds(stream, [calls(i) for i in range(QUEUED)]) for _ in range(ROUNDS + 2)]
    return statistics.median(rounds[2:])


def complete(sender: Any, push: Push, sources: list[int], parts: int = 1) -> float:
    """Pushes blocks in parts and waits until all are written; seconds."""
    missing, began = set(range(len(sources))), time.perf_counter()
    size = -(-len(sources) // parts)
    for first in range(0, len(sources), size):
        sender.push(push, first, sources[first : first + size], last=first + size >= len(sources))
    while missing:
        sender.engine.ctx.turn()
        for news in sender.progress():
            assert isinstance(news, Written) and news.ticket == push.ticket, news
            missing -= set(range(news.first, news.first + len(news.checks)))
        assert time.perf_counter() - began < 60, "nothing arrives"
    return time.perf_counter() - began


def run(name: str, target: str) -> dict[str, Any]:
    """All figures of one model, with the taker's pool on the device `target`; raises where a byte differs."""
    layout, per_set = LAYOUTS[name], LAYOUTS[name].blocks_for(TOKENS)
    num_blocks, moved = per_set * SETS[name], per_set * LAYOUTS[name].block_bytes
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=taker, args=(theirs, name, num_blocks, target), daemon=True)
    process.start()
    kv = arena(layout, num_blocks, OWN)
    fill(kv, 1)
    torch.cuda.synchronize()
    sender = cuda_ipc.make_sender(engine(kv, layout))
    device = sender.links.device  # type: ignore[attr-defined]
    assert isinstance(device, CudaDevice)

    def ask(*what: object) -> Any:
        pipe.send(what)
        assert pipe.poll(120), f"the taker doesn't answer {what[0]}"
        return pipe.recv()

    rng = random.Random(0)
    targets, sources = (rng.sample(range(num_blocks), per_set) for _ in range(2))
    address = ask("address")
    offset = msgspec.msgpack.decode(address, type=cuda_ipc.PoolAddress).offset
    push = Push("a", 1, "decode.0", 1, address, targets)
    first_s = complete(sender, push, sources, parts=3)
    assert ask("differing", targets, sources, 1, 0.0) == 0, "a byte differs"
    complete(sender, Push("b", 2, "decode.0", 1, ask("busy"), targets), sources)
    assert ask("differing", targets, sources, 1, 7.0) == 0, "blocks that weren't at rest were written to"

    mapped = sender._takers["decode.0"].link
    order = rng.sample(range(num_blocks), num_blocks)
    sets = [order[i : i + per_set] for i in range(0, num_blocks, per_set)]
    ids = [np.array(list(zip(to, of, strict=True)), np.int32) for to, of in zip(sets, sets[1:] + sets[:1], strict=True)]
    by_ipc = median_ms(device._stream, lambda i: lambda: device.copy(mapped, ids[i % len(ids)], None))

    twin = torch.empty_like(kv, device=target)
    halves = [slice(i * per_set, (i + 1) * per_set) for i in range(SETS[name])]
    stream = torch.cuda.Stream()

    def plain(i: int) -> Callable[[], object]:
        of, to = halves[i % len(halves)], halves[(i + 1) % len(halves)]
        return lambda: twin[to].copy_(kv[of], non_blocking=True)

    plainly = median_ms(stream, plain)
    one = statistics.median(complete(sender, Push("c", 3, "decode.0", 1, address, targets), sources) for _ in range(15))
    alone = []
    for i in range(15):
        torch.cuda.synchronize()
        began = time.perf_counter()
        plain(i)()
        torch.cuda.synchronize()
        alone.append(time.perf_counter() - began)
    on_device = [torch.from_numpy(pairs).to(OWN) for pairs in ids]

    def tiled(tile: int, warps: int) -> float:
        def call(i: int) -> Callable[[], object]:
            pairs = on_device[i % len(ids)]
            return lambda: copy_blocks(mapped.memory, kv, pairs, layout.block_bytes, tile=tile, warps=warps)

        return 2 * moved / median_ms(stream, call) / 1e9

    tiles = {
        f"{t} words, {w} warps": round(tiled(t, w), 3)
        for t, w in ((1024, 4), (2048, 4), (4096, 8), (8192, 8), (16384, 16))
    }
    process.kill()
    process.join()
    device.copy(mapped, ids[0], None).synchronize()  # the memory outlives its owner until it is unmapped
    sender.forget("decode.0")
    sender.engine.ctx.turn(wait_s=10.0)
    sender.close()
    return {
        "tokens": TOKENS,
        "blocks": per_set,
        "block_mb": round(layout.block_bytes / 1e6, 3),
        "offset_mb": round(offset / 1e6, 1),
        "moved_mb": round(moved / 1e6, 1),
        "first_s": round(first_s, 3),
        "copy_tb_s": round(2 * moved / by_ipc / 1e9, 3),
        "plain_tb_s": round(2 * moved / plainly / 1e9, 3),
        "share": round(plainly / by_ipc, 3),
        "one_ms": round(one * 1e3, 3),
        "plain_one_ms": round(statistics.median(alone) * 1e3, 3),
        "tb_s_by_tile": tiles,
    }


def main() -> None:
    """Prints JSON; ends with 1 where a model is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--only", choices=LAYOUTS)
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "from_to": [OWN, PEER if args.peer else OWN],
        "bar": BAR,
    }
    for name in [args.only] if args.only else LAYOUTS:
        figures[name] = run(name, PEER if args.peer else OWN)
        print(name, json.dumps(figures[name]), flush=True)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    if any(isinstance(row, dict) and row["share"] < BAR for row in figures.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
