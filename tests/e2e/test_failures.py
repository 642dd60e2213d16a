"""The distributed service when things go wrong: clients that leave, workers that die, signals."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest
from harness import ROOT, Service, prompt_ids, service


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until `holds`; fails naming `what`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} didn't happen in {seconds} s"
        time.sleep(0.05)


def get(running: Service, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def metric(running: Service, name: str) -> dict[str, float]:
    """Values of a metric, by worker."""
    lines = re.findall(rf"^{re.escape(name)}{{([^}}]*)}} (\S+)$", get(running, "/metrics")[1], re.MULTILINE)
    found: dict[str, float] = {}
    for labels, value in lines:
        worker = re.search(r'worker="([^"]+)"', labels)
        found[worker[1] if worker else ""] = float(value)
    return found


def free_blocks(running: Service) -> dict[str, float]:
    return metric(running, "flowinfer:kv_blocks_free")


def workers(running: Service) -> dict[str, psutil.Process]:
    """Worker processes by instance name."""
    found = {}
    for child in psutil.Process(running.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may be dying
            match = re.search(r"worker_main (\S+)", " ".join(child.cmdline()))
            if match:
                found[match[1]] = child
    return found


def client(running: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0, timeout=120)


def ask(running: Service, text: str = "What is the capital of France?") -> str:
    messages = [{"role": "user", "content": text}]
    answer = client(running).chat.completions.create(
        model=running.model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=32,
    )
    return answer.choices[0].message.content or ""


def leave_after(running: Service, seconds: float, prompt: list[int], stream: bool) -> None:
    """Asks for a long answer and hangs up."""
    body = {"model": running.model, "prompt": prompt, "max_tokens": 400, "stream": stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    connection.sendall(b"content-length: %d\r\n\r\n" % len(data) + data)
    time.sleep(seconds)
    connection.close()


def test_200_disconnects_leave_every_block_free(prod: Service) -> None:
    """At random moments: before the first token, in prefill, in transfer, in the stream; also without streaming."""
    wait_until(lambda: len(free_blocks(prod)) == 2, 20, "both pools reporting")
    ask(prod)
    time.sleep(1.5)  # until the pools' last report is in
    before = free_blocks(prod)
    rng = random.Random(0)
    for _ in range(25):
        threads = [
            threading.Thread(
                target=leave_after,
                args=(
                    prod,
                    rng.random() * 0.4,
                    prod.prompt_ids(rng.choice([5, 80, 400]), rng.randrange(10)),
                    rng.random() < 0.7,
                ),
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wait_until(lambda: free_blocks(prod) == before, 30, f"free blocks as before ({before}, now {free_blocks(prod)})")
    assert ask(prod) == "The capital of France is Paris."


@pytest.mark.parametrize("victim", ["prefill.0", "decode.0", "front.0"])
def test_a_killed_worker_comes_back_and_the_service_is_well(prod: Service, victim: str) -> None:
    before = workers(prod)
    assert set(before) == {"front.0", "prefill.0", "decode.0"}
    results: list[str] = []

    def load(i: int) -> None:
        try:
            prod.complete(prod.prompt_ids(40 + 40 * i, seed=i), 80)
            results.append("answered")
        except (RuntimeError, OSError, http.client.HTTPException, KeyError, json.JSONDecodeError) as error:
            results.append(f"failed: {error}")

    threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    os.kill(before[victim].pid, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert len(results) == 6, "every request ended"
    wait_until(lambda: set(workers(prod)) == set(before) and _ready(prod), 90, f"{victim} up again")
    assert workers(prod)[victim].pid != before[victim].pid
    assert {name for name in before if workers(prod)[name].pid != before[name].pid} == {victim}
    assert ask(prod) == "The capital of France is Paris."


def test_a_stream_outlives_the_worker_that_computed_its_prompt(prod: Service) -> None:
    """Decode goes on reading the dead worker's blocks, and its successor leaves them alone until they are released."""
    prompt = prod.prompt_ids(300, seed=77)
    expected = prod.complete(prompt, 100).text
    time.sleep(1.5)
    before = free_blocks(prod)
    text: list[str] = []
    thread = threading.Thread(target=lambda: text.append(prod.complete(prompt, 100).text))
    thread.start()
    wait_until(lambda: metric(prod, "flowinfer:batch_sequences").get("decode.0") == 1, 30, "decode at work")
    old = workers(prod)["prefill.0"].pid
    os.kill(old, signal.SIGKILL)
    wait_until(
        lambda: workers(prod).get("prefill.0") is not None and workers(prod)["prefill.0"].pid != old, 60, "respawn"
    )
    wait_until(lambda: _ready(prod), 60, "prefill back")
    crowd = [threading.Thread(target=prod.complete, args=(prod.prompt_ids(400, 200 + i), 2)) for i in range(3)]
    for other in crowd:
        other.start()
    for other in (thread, *crowd):
        other.join(120)
    assert text == [expected]
    wait_until(lambda: free_blocks(prod) == before, 30, f"all blocks free ({before}, now {free_blocks(prod)})")


def _ready(running: Service) -> bool:
    try:
        return get(running, "/ready")[0] == 200
    except OSError:
        return False


def test_ctrl_c_finishes_what_is_open_and_leaves_nothing_behind(smollm2: Path) -> None:
    with service("quickstart.yaml") as running:
        children = list(workers(running).values())
        sockets = _run_dirs(running)
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(running.complete(prompt_ids(20, 1), 60).usage["completion_tokens"])
        )
        asking.start()
        time.sleep(0.7)
        running.process.send_signal(signal.SIGINT)
        asking.join(60)
        running.process.wait(60)
        assert answers == [60], "an open answer is finished"
        assert running.process.returncode == 0
        assert not [child for child in children if child.is_running()]
        assert sockets and not [path for path in sockets if path.exists()]


def _run_dirs(running: Service) -> list[Path]:
    """Folders of the ipc sockets that the service's workers listen on."""
    found = set()
    for process in workers(running).values():
        for connection in process.net_connections("unix"):
            if str(connection.laddr).startswith("/"):
                found.add(Path(str(connection.laddr)).parent)
    return sorted(found)


def test_a_start_failure_names_stage_place_and_cause() -> None:
    command = [sys.executable, "-m", "flowinfer", "run", "pipelines/prod.yaml", "--set", "vars.model=/no/such/model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "/no/such/model" in said
    assert "Traceback" not in said
