"""Weights from the page cache to a device in GB/s, and seconds from a process's start to its first token.

Run: PYTHONPATH=. python tests/bench/bench_load.py --config qwen3-8b [--threads 1,8,8m] [--folder DIR] [--json F]
Writes a checkpoint of random numbers in the shape of a named config (or of a config.json, which may be small), so that
its files lie in the page cache, then loads it by the engine's own loader and compares tensors with the files. Each
start is a process of its own: imports, weights, kernels out of their compile cache, graphs captured, an answer of one
token. The first start fills the compile cache; the second finds it warm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowinfer.engine import card_reader
from flowinfer.engine.formats import INDEX
from flowinfer.engine.models import load as loading
from flowinfer.engine.models.config import read_config
from flowinfer.engine.models.named import RANDOM, write_random
from flowinfer.engine.weights import Weights

SHARD = 4 << 30  # bytes, about
POOL = 64 << 20  # bytes of random numbers that all tensors are cut from


class Names:
    """Stands in for weights and notes which tensors the loader asks for."""

    dtype, device = torch.bfloat16, torch.device("meta")

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
        """Nothing but a shape."""
        self.shapes[name] = shape
        return torch.empty(shape, dtype=self.dtype, device=self.device) if out is None else out

    def settle(self) -> None:
        """Nothing is under way."""

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Nothing is left over."""


def write_checkpoint(config: str, folder: Path) -> int:
    """Makes `folder` a model of this shape, bfloat16, in shards as the hub has them. Returns its weights' bytes."""
    write_random(config, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != RANDOM}))
    names = Names()
    loading._Loader(read_config(folder), names).model(None)  # type: ignore[arg-type]
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in names.shapes.items():
        if size > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += bytes_of(shape)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    pool = torch.randn(POOL // 2, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16().view(torch.uint8)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda file, shard: write_shard(folder / file, shard, pool.numpy()), files, shards))
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return sum(bytes_of(shape) for shape in names.shapes.values())


def bytes_of(shape: tuple[int, ...]) -> int:
    """Of a bfloat16 tensor."""
    return 2 * int(np.prod(shape))


def write_shard(file: Path, shapes: dict[str, tuple[int, ...]], pool: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """A safetensors file of numbers out of the pool."""
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + bytes_of(shape)]}
        at += bytes_of(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        first = 2 * (sum(file.name.encode()) % 1000)
        while at > 0:
            at -= out.write(memoryview(pool)[first : first + at])
            first = 0


def load(folder: Path, device: str, way: str) -> dict[str, Any]:
    """GB/s of the loader, median of two loads behind one that allocates. way: threads, with an m where it maps."""
    size, seconds = weight_bytes(folder), []
    threads = int(way.removesuffix("m"))
    if threads:
        card_reader.THREADS, card_reader.MAPPED = threads, way.endswith("m")
    for _ in range(3):
        began = time.perf_counter()
        model = loading.load(folder, dtype="auto", device=device)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        del model
    again = statistics.median(seconds[1:])
    return {"threads": way, "first_gb_s": size / seconds[0] / 1e9, "gb_s": size / again / 1e9, "seconds": seconds}


def weight_bytes(folder: Path) -> int:
    """Of all files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check(folder: Path, device: str) -> None:
    """Raises where a tensor on the device isn't the file's."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    names = list(places)
    with (
        Weights(folder, dtype=torch.bfloat16, device=torch.device("cpu")) as mapped,
        Weights(folder, dtype=torch.bfloat16, device=torch.device(device)) as moved,
    ):
        for name in (*names[:3], *names[len(names) // 2 :][:3], *names[-3:]):
            if not torch.equal(moved.moved(name).cpu(), mapped.raw(name)):
                raise RuntimeError(f"{name} isn't what the file holds")


def start(folder: Path, device: str, max_batch: int, born: float) -> dict[str, float]:
    """Seconds from the process's start (time.time()) to the first token, by part."""
    from flowinfer.bench.service import EngineService
    from flowinfer.engine import engine

    spent = {"imports": time.time() - born}
    load_model = engine.load_model

    def timed(*args: Any, **options: Any) -> Any:
        began = time.time()
        model = load_model(*args, **options)
        if device != "cpu":
            torch.cuda.synchronize()
        spent["weights"] = time.time() - began
        return model

    engine.load_model = timed
    began = time.time()
    service = EngineService(
        str(folder),
        device=device,
        dtype="auto",
        num_blocks=4 * max_batch,
        max_batch=max_batch,
        max_tokens=128,
        chunk=8192,
    )
    spent["graphs and the rest"] = time.time() - began - spent["weights"]
    began = time.time()
    service.answer([np.arange(3, 19, dtype=np.int32)], 1)
    spent["first answer"] = time.time() - began
    spent["first token"] = time.time() - born
    return spent


def child(*args: str) -> dict[str, Any]:
    """What a process of this file printed last."""
    command = [sys.executable, __file__, "--born", str(time.time()), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints a line a measurement and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="smollm2-135m")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, and removed from")
    parser.add_argument("--checkpoint", type=Path, help="one that lies there, or is written there and kept")
    parser.add_argument(
        "--threads", default="0", help="of the reader, with commas, 8m: over a mapping; 0: as it chooses; empty: skip"
    )
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--born", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=["load", "start"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "start":
        print(json.dumps(start(args.folder, args.device, args.max_batch, args.born)))
    elif args.child == "load":
        check(args.folder, args.device)
        print(json.dumps([load(args.folder, args.device, way) for way in args.threads.split(",")]))
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """All of it, in a folder of its own unless one is named."""
    folder = args.checkpoint or Path(tempfile.mkdtemp(dir=args.folder, prefix="flowinfer-load-"))
    name = torch.cuda.get_device_name(args.device) if args.device != "cpu" else "cpu"
    options = ("--device", args.device, "--folder", str(folder), "--max-batch", str(args.max_batch))
    try:
        if not (folder / INDEX).exists():
            began = time.perf_counter()
            size = write_checkpoint(args.config, folder)
            print(f"{args.config}: {size / 1e9:.1f} GB written in {time.perf_counter() - began:.1f} s", flush=True)
        found: dict[str, Any] = {"config": args.config, "device": name, "cores": os.cpu_count()}
        found["bytes"], found["load"], found["starts"] = weight_bytes(folder), [], []
        if args.threads:
            found["load"] = child(*options, "--child", "load", "--threads", args.threads)
        for row in found["load"]:
            threads = "default" if row["threads"] == "0" else row["threads"]
            print(
                f"{args.config}, {threads} threads: {row['gb_s']:.2f} GB/s, first {row['first_gb_s']:.2f}", flush=True
            )
        for _ in range(args.starts):
            found["starts"].append(child(*options, "--child", "start"))
            parts = ", ".join(f"{part} {s:.1f} s" for part, s in found["starts"][-1].items())
            print(f"{args.config}, start: {parts}", flush=True)
    finally:
        if args.checkpoint is None:
            shutil.rmtree(folder)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
