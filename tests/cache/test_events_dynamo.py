"""Block events as Dynamo's own indexer reads them (pip install ai-dynamo-runtime), in a process of its own.

FLOWINFER_TEST_DYNAMO names a Python that has it, where this one hasn't.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from flowinfer.cache.events import BlockEvents, Form
from flowinfer.cache.keys import chain_hashes
from flowinfer.channel import Publisher

PYTHON = os.environ.get("FLOWINFER_TEST_DYNAMO", sys.executable)
if sys.executable == PYTHON and importlib.util.find_spec("dynamo") is None:
    pytest.skip("Dynamo isn't installed (pip install ai-dynamo-runtime)", allow_module_level=True)

SIZE = 64
TOKENS = np.arange(5 * SIZE, dtype=np.int32)
NAMES = chain_hashes(TOKENS, namespace="test", salt="", block_tokens=SIZE)
PATIENCE_S = 30.0


class Indexer:
    """The HTTP side of `python -m dynamo.indexer`."""

    def __init__(self, publisher: Publisher) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.publisher = publisher
        self.process = subprocess.Popen([PYTHON, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"])

    def call(self, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=5) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def until(self, claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.publisher.answer()  # as the stage does, for who asks for past events
            try:
                if claim():
                    return
            except (urllib.error.URLError, KeyError):
                pass  # not there yet
            time.sleep(0.05)
            # What was sent before the subscription got through is missed, which the next number shows.
            self.publisher.publish("kv@prefill.0@m", msgspec.msgpack.encode([time.time(), [], 0]))
        pytest.fail("the indexer didn't come to this")

    def found(self, tier: str) -> int:
        """Tokens of the prompt that it believes to be in this tier, or nearer."""
        query = {"token_ids": TOKENS.tolist(), "model_name": "m"}
        return int(self.call("/query", **query)["instances"].get("1", {}).get(tier, 0))


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    publisher = Publisher(0, 0)
    publisher.open()
    made = Indexer(publisher)
    try:
        made.until(lambda: made.call("/health") is not None)
        listen = {"endpoint": f"tcp://127.0.0.1:{publisher.port}", "dp_rank": 0}
        replay = f"tcp://127.0.0.1:{publisher.replay_port}"
        made.call("/register", instance_id=1, model_name="m", block_size=SIZE, replay_endpoint=replay, **listen)
        made.until(lambda: made.call("/workers")[0]["listeners"]["0"]["status"] == "active")
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        publisher.close()


@pytest.mark.parametrize("form", ["array", "map"])
def test_dynamo_knows_what_our_workers_and_tiers_hold(indexer: Indexer, form: Form) -> None:
    publisher = indexer.publisher
    told = BlockEvents(SIZE, lambda owner, batch: publisher.publish(f"kv@{owner}@m", batch), time.time, form)
    told.seen(NAMES, TOKENS)
    told.stored("prefill.0", NAMES[:3])
    told.stored("prefill.1", NAMES[:2])
    told.stored("disk", NAMES[:4])
    told.stored("object", NAMES)
    indexer.until(lambda: indexer.found("longest_matched") == 5 * SIZE)
    assert indexer.found("gpu") == 3 * SIZE
    told.removed("prefill.0", NAMES[1:3])
    indexer.until(lambda: indexer.found("gpu") == 2 * SIZE)
    told.cleared("prefill.1")
    indexer.until(lambda: indexer.found("gpu") == SIZE)


def test_dynamo_gets_what_it_missed_when_it_asks(indexer: Indexer) -> None:
    publisher = indexer.publisher
    told = BlockEvents(SIZE, lambda owner, batch: publisher.publish(f"kv@{owner}@m", batch), time.time)
    told.seen(NAMES, TOKENS)
    publisher._past.append((publisher._next, _lost(told)))  # numbered and kept, but never sent
    publisher._next += 1
    told.stored("prefill.0", NAMES[2:3])
    indexer.until(lambda: indexer.found("gpu") == 3 * SIZE)


def _lost(told: BlockEvents) -> bytes:
    kept: list[bytes] = []
    send, told._send = told._send, lambda owner, batch: kept.append(batch)
    told.stored("prefill.0", NAMES[:2])
    told._send = send
    return kept[0]
