"""What benchmarks share: the machine's name, a running service, and clients that stamp each token."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def machine() -> str:
    """Processor, cores and torch of this machine, for the head of every table."""
    import torch

    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = (re.search(r"model name\s*: (.*)", text) or [None, platform.processor()])[1]
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in text]
    return f"{name}, {os.cpu_count()} cores, {' '.join(flags) or 'no bf16 units'}, torch {torch.__version__}"


@dataclass
class Stream:
    """One answer: when it was asked for, when each of its tokens came (seconds of perf_counter)."""

    asked: float = 0.0
    tokens: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass
class Service:
    """A service started by `flowinfer run`, on a port that it chose."""

    port: int
    process: subprocess.Popen[str]
    model: str
    started_s: float

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> Stream:
        """Streams one completion; greedy, to its full length."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}, **fields}
        stream = Stream(asked=time.perf_counter())
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                self._take(stream, json.loads(line[6:]))
        connection.close()
        return stream

    def _take(self, stream: Stream, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        now = time.perf_counter()
        if event.get("usage"):
            stream.usage = event["usage"]
        for choice in event.get("choices", ()):
            stream.tokens.append(now)
            stream.text += choice["text"]

    def prompt_ids(self, count: int, seed: int) -> list[int]:
        """Token ids of plain English in this model's vocabulary."""
        return prompt_ids(count, seed, self.model)

    def all(self, requests: Sequence[tuple[Sequence[int] | str, int]]) -> list[Stream]:
        """Streams these (prompt, max_tokens) at once."""
        streams: list[Stream | None] = [None] * len(requests)

        def one(i: int) -> None:
            streams[i] = self.complete(*requests[i])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [stream for stream in streams if stream is not None]


@contextlib.contextmanager
def service(pipeline: str, *settings: str, kv: Path | None = None) -> Iterator[Service]:
    """Runs a pipeline of this checkout until the block ends. kv: folder of its disk tier; by default an empty one."""
    with tempfile.TemporaryDirectory(prefix="kv-", ignore_cleanup_errors=True) as empty:
        yield from _service(pipeline, settings, kv or Path(empty))


def _service(pipeline: str, settings: Sequence[str], kv: Path) -> Iterator[Service]:
    sets = [part for setting in ("serve.port=0", *settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "flowinfer", "run", str(ROOT / "pipelines" / pipeline), *sets]
    began = time.perf_counter()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"FLOWINFER_KV": str(kv)}, **pipes)
    try:
        port = _port(process)
        seconds = time.perf_counter() - began
        drain = threading.Thread(target=_drain, args=(process,), daemon=True)
        drain.start()
        yield Service(port, process, _model(port), seconds)
    finally:
        process.terminate()
        process.wait(60)


def _drain(process: subprocess.Popen[str]) -> None:
    """Reads what the service says; FLOWINFER_BENCH_LOG names a file that it is added to."""
    with open(os.environ.get("FLOWINFER_BENCH_LOG", os.devnull), "a") as log:  # noqa: PTH123
        for line in process.stdout or ():
            log.write(line)
            log.flush()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            return int(match[1])
    raise RuntimeError("the service didn't start:\n" + "".join(lines))


def _model(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/v1/models")
    return str(json.loads(connection.getresponse().read())["data"][0]["id"])


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@functools.cache
def _english(model: str) -> list[int]:
    """Token ids of Python's own language reference, which every installation has."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    from flowinfer.engine import hub

    text = "\n".join(topics[name] for name in sorted(topics))[:300_000]
    return Tokenizer.from_file(str(hub.resolve(model) / "tokenizer.json")).encode(text).ids


def english(count: int, seed: int) -> str:
    """About `count` tokens of plain English, elsewhere for each seed."""
    from tokenizers import Tokenizer

    from flowinfer.engine import hub

    file = str(hub.resolve("smollm2-135m") / "tokenizer.json")
    return str(Tokenizer.from_file(file).decode(prompt_ids(count, seed)))


def prompt_ids(count: int, seed: int, model: str = "smollm2-135m") -> list[int]:
    """`count` token ids of plain English; other seeds begin elsewhere, so that no two share a block."""
    ids = _english(model)
    start = random.Random(seed).randrange(len(ids) - count)
    return ids[start : start + count]
