"""KV that travels as frames between true processes: whatever happens to one end, the other is free again soon."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from harness import Service

from flowinfer.runtime.worker import HEARTBEAT_S

SLACK_S = 1.5  # of a busy machine, and until the next metrics have come, which a heartbeat brings
POOLS = {"prefill.0", "decode.0"}


def metrics(running: Service) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def by_worker(running: Service, name: str) -> dict[str, float]:
    """Values of a metric."""
    found = re.findall(rf'^flowinfer:{name}{{[^}}]*worker="([^"]+)"[^}}]*}} (\S+)$', metrics(running), re.MULTILINE)
    return {worker: float(value) for worker, value in found}


def free_blocks(running: Service) -> dict[str, float]:
    """Free KV blocks by worker."""
    return by_worker(running, "kv_blocks_free")


def handed_over(running: Service) -> float:
    """Tokens of all prompts that prefill has done with."""
    return by_worker(running, "prefix_cache_queries_tokens_total")["prefill.0"]


def wait_until(holds: Callable[[], bool], seconds: float) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + seconds, f"not in {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - began


def process(running: Service, name: str) -> psutil.Process:
    for child in psutil.Process(running.process.pid).children(recursive=True):
        if child.cmdline()[-1:] == [name]:
            return child
    raise AssertionError(f"{name} doesn't run")


@pytest.fixture
def before(frames: Service) -> Iterator[dict[str, float]]:
    """Free blocks of both pools, when nothing is under way; they must be so again at the end."""
    wait_until(lambda: free_blocks(frames).keys() == POOLS and is_answered(frames), 60)
    time.sleep(HEARTBEAT_S)  # until the count of after that answer is in
    at_start = free_blocks(frames)
    yield at_start
    wait_until(lambda: is_answered(frames), 60)
    wait_until(lambda: free_blocks(frames) == at_start, 10)


def is_answered(running: Service) -> bool:
    body = json.dumps({"model": running.model, "prompt": [3, 4, 5], "max_tokens": 1})
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection.getresponse().status == 200


def begin(running: Service, num_tokens: int) -> socket.socket:
    """Asks for an answer to a prompt, and doesn't wait for it."""
    body = {
        "model": running.model,
        "prompt": running.prompt_ids(num_tokens, num_tokens),
        "max_tokens": 4,
        "stream": True,
    }
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    connection.sendall(b"content-length: %d\r\n\r\n" % len(data) + data)
    return connection


def test_a_client_that_leaves_in_prefill_frees_both_ends_within_a_second(
    frames: Service, before: dict[str, float]
) -> None:
    connection = begin(frames, 3_000)
    wait_until(lambda: all(free_blocks(frames)[name] < before[name] for name in POOLS), 10)
    connection.close()
    wait_until(lambda: free_blocks(frames) == before, 1 + SLACK_S)


def test_when_prefill_dies_its_blocks_to_come_are_free_within_two_heartbeats(
    frames: Service, before: dict[str, float]
) -> None:
    connection = begin(frames, 3_000)
    wait_until(lambda: all(free_blocks(frames)[name] < before[name] for name in POOLS), 10)
    process(frames, "prefill.0").kill()
    wait_until(lambda: free_blocks(frames)["decode.0"] == before["decode.0"], 2 * HEARTBEAT_S + SLACK_S)
    connection.close()


def test_when_decode_dies_what_was_lent_to_it_is_free_within_two_heartbeats(
    frames: Service, before: dict[str, float]
) -> None:
    decode, done = process(frames, "decode.0"), handed_over(frames)
    os.kill(decode.pid, signal.SIGSTOP)  # it takes nothing any more: prefill ends, and waits for it
    connection = begin(frames, 200)
    reader = threading.Thread(target=connection.recv, args=(1,), daemon=True)
    reader.start()
    wait_until(lambda: handed_over(frames) == done + 200, 10)
    assert free_blocks(frames)["prefill.0"] < before["prefill.0"]
    decode.kill()
    wait_until(lambda: free_blocks(frames)["prefill.0"] == before["prefill.0"], 2 * HEARTBEAT_S + SLACK_S)
    connection.close()
