"""The tcp sender of a GPU, whose blocks come to the host beside the worker's steps: stand-ins say when they are there.

With FLOWINFER_TEST_DEVICE=cuda:0 a card's own copies are tried too.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowinfer.engine.block_copies import BlockCopies
from flowinfer.message import KVData
from flowinfer.transfer import tcp
from flowinfer.transfer.check import check_of
from flowinfer.transfer.memory import Fetching, PoolMemory
from flowinfer.transfer.tcp import TcpSender
from flowinfer.transfer.transport import Push

DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
NUM_BLOCKS, SIZE = 6, 4


class Arrival:
    """There once `done` is set."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Gpu:
    """Block b holds the number b."""

    on_host = False

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []

    def fetch(self, blocks: list[int]) -> Fetching:
        self.arrivals.append(Arrival())
        rows = np.repeat(np.array(blocks, np.uint8)[:, None], SIZE, 1)
        return Fetching(rows, self.arrivals[-1])


class Setup:
    def __init__(self) -> None:
        self.sent: list[tuple[KVData, str]] = []
        ctx = SimpleNamespace(send=lambda frame, to: self.sent.append((frame, to)))
        engine: Any = SimpleNamespace(kv=torch.zeros(NUM_BLOCKS, SIZE), layout=SimpleNamespace(digest="d"), ctx=ctx)
        self.sender = TcpSender(engine)
        self.gpu = self.sender.memory = Gpu()  # type: ignore[assignment]

    def push(self, ticket: int, first: int, sources: list[int], to: str = "decode.0", last: bool = False) -> None:
        self.sender.push(Push(f"r{ticket}", ticket, to, 1, b"", range(9)), first, sources, last=last)

    def told(self) -> list[tuple[int, int, int]]:
        """(ticket, index, what its bytes are) of each frame."""
        assert all(frame.check == check_of(frame.data) for frame, _ in self.sent)
        return [(frame.ticket, frame.index, int(frame.data[0])) for frame, _ in self.sent]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(tcp, "PATIENCE_S", 0.0)
    return Setup()


def test_frames_leave_when_their_blocks_have_come_and_in_order(setup: Setup) -> None:
    setup.push(1, 0, [3, 5])
    setup.push(1, 2, [4], last=True)
    assert setup.sender.pending and not setup.told()
    setup.gpu.arrivals[1].done = True
    assert setup.sender.progress() == () and not setup.told(), "the first are still on their way"
    setup.gpu.arrivals[0].done = True
    setup.sender.progress()
    assert setup.told() == [(1, 0, 3), (1, 1, 5), (1, 2, 4)] and not setup.sender.pending


def test_what_is_given_up_is_not_sent(setup: Setup) -> None:
    setup.push(1, 0, [1])
    setup.push(2, 0, [2])
    setup.push(3, 0, [3], to="decode.1")
    assert setup.sender.cancel(1)
    setup.sender.forget("decode.1")
    for arrival in setup.gpu.arrivals:
        arrival.done = True
    setup.sender.progress()
    assert setup.told() == [(2, 0, 2)]


def test_the_last_blocks_are_waited_for_a_moment(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PATIENCE_S", 10.0)
    asked = iter([False, False, True])
    monkeypatch.setattr(Arrival, "query", lambda self: next(asked))
    setup.push(1, 0, [1], last=True)
    assert setup.told() == [(1, 0, 1)]


@pytest.mark.parametrize("part", [slice(0, 16), slice(4, 12), slice(1, 3)])
def test_parts_of_blocks_go_out_and_come_back(part: slice) -> None:
    kv = torch.arange(96.0, device=DEVICE).view(6, 16)
    before, copies, blocks = kv.cpu().clone(), BlockCopies(kv), np.array([4, 1], np.int32)
    assert copies.packs(part) == (DEVICE != "cpu" and part.start % 4 == 0)
    rows = torch.empty(2, part.stop - part.start, pin_memory=DEVICE != "cpu")
    copies.fetch(blocks, part, rows)
    settle()
    assert torch.equal(rows, before[[4, 1], part])
    copies.put(blocks[::-1].copy(), part, rows)
    before[[1, 4], part] = rows
    assert torch.equal(kv.cpu(), before)
    copies.within(np.array([0, 2], np.int32), np.array([5, 3], np.int32))
    assert torch.equal(kv.cpu()[[0, 2]], before[[5, 3]])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a card")
@pytest.mark.parametrize("size", [64, 300_000], ids=["packed", "each"])
def test_blocks_of_a_card_come_to_the_host_and_go_back(size: int) -> None:
    kv = torch.randn(5, size, device=DEVICE)
    memory = PoolMemory(kv)
    fetching = memory.fetch([3, 0])
    fetching.done.synchronize()
    assert all(np.array_equal(row, memory.read(block)) for row, block in zip(fetching.rows, (3, 0), strict=True))
    memory.write(1, fetching.rows[0])
    assert torch.equal(kv[1], kv[3])


def settle() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()
