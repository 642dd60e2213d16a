"""Two hundred clients that come, stay or leave as they like: each accepted request ends once, nothing stays open."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flowinfer.message import Call, Cancel, Ended, Failure, Finish, Piece

NUM_CLIENTS = 200
NUM_AT_ONCE = 40


def unsteady(seed: int) -> Any:
    """A pipeline that answers some, fails some in the middle, and never finishes others."""
    chance = random.Random(seed)

    def answer(call: Call) -> Iterator[Any]:
        fate = chance.choice(["whole", "whole", "fail", "never"])
        for _ in range(chance.randrange(5)):
            yield Piece(id=call.id, text="word ", tokens=[1])
        if fate == "whole":
            yield Piece(id=call.id, finish=Finish(reason="stop", completion_tokens=5))
        elif fate == "fail":
            yield Failure(id=call.id, status=500, message="broke")

    return answer


async def client(port: int, chance: random.Random, slots: asyncio.Semaphore) -> bytes:
    """Asks, reads for a while, and leaves or waits for the end. What it read."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    body |= {"stream": chance.random() < 0.6, "n": chance.choice([1, 1, 3])}
    text = json.dumps(body).encode()
    async with slots:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(text) + text)
        data = b""
        try:
            # Those whose request never ends leave as well: by and by. A busy machine answers nobody in a tenth of a
            # second, so some wait longer.
            patience = chance.choice([0.0, 0.001, 0.01, 0.1, 0.1, 2.0])
            async with asyncio.timeout(patience):
                data = await reader.read()
        except TimeoutError:
            pass
        writer.close()
        return data


async def storm(port: int, seed: int) -> list[bytes]:
    chance, slots = random.Random(seed), asyncio.Semaphore(NUM_AT_ONCE)
    return await asyncio.gather(*(client(port, chance, slots) for _ in range(NUM_CLIENTS)))


def test_every_request_of_a_storm_ends_once(start: Any) -> None:
    calls: list[str] = []
    answer = unsteady(1)

    def noted(call: Call) -> Iterator[Any]:
        calls.append(call.id)
        return answer(call)

    service = start(noted, max_requests=60)
    read = asyncio.run(storm(int(service.url.rpartition(":")[2]), 2))
    service.wait_idle()
    ends = Counter(id for event in service.ctx.sent if isinstance(event, Cancel | Ended) for id in event.ids)
    assert set(ends) == set(calls)
    assert set(ends.values()) == {1}
    statuses = Counter(data[9:12] for data in read if data)
    assert statuses[b"200"]
    assert set(statuses) <= {b"200", b"429", b"500"}
    for data in read:
        if data.startswith(b"HTTP/1.1 200") and b"[DONE]" not in data:
            assert b"finish_reason" in data or b"keep-alive" in data  # never an empty success
