"""Blocks through staged memory, half by half: on a CPU whose "device" copies at once, the runs and the counts are those
of a GPU; `FLOWINFER_TEST_DEVICE=cuda:0` runs it on one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowinfer.engine import staging
from flowinfer.engine.layout import KVLayout, KVSection
from flowinfer.engine.staging import Staging

DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4)
PARTS = (
    KVSection("compressed", "e", 2, 4),
    KVSection("window", "w", 8, 4),
    KVSection("state", "s", 2, 8, at_end=False),
)
WINDOWED = KVLayout(model="w", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, sections=PARTS, window=8)
COUNT = 23


class Stream:
    """Does everything at once."""

    def __init__(self, device: Any = None) -> None:
        self.events = 0

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> Stream:
        return self


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[torch.Tensor, Staging]:
    """KV and its staging, four blocks a half; of the layout that is the fixture's parameter."""
    layout: KVLayout = getattr(request, "param", LAYOUT)
    torch.manual_seed(0)
    kv = torch.randn(COUNT, *layout.block_shape).to(DEVICE)
    monkeypatch.setattr(staging, "STAGED_BYTES", 8 * layout.block_bytes)
    made = Staging(kv, layout)
    if DEVICE == "cpu":
        made._is_direct = False
        cuda = SimpleNamespace(
            Stream=Stream,
            stream=lambda stream: contextlib.nullcontext(),
            device=lambda device: contextlib.nullcontext(),
            current_stream=lambda device: Stream(),
        )

        def empty(*shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
            return torch.empty(*shape, **how)

        fake = SimpleNamespace(cuda=cuda, empty=empty, uint8=torch.uint8, inference_mode=torch.inference_mode)
        monkeypatch.setattr(staging, "torch", fake)
    return kv, made


def data(block: torch.Tensor) -> bytes:
    return block.cpu().numpy().tobytes()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 23])
def test_every_block_is_written_once_with_its_own_bytes(staged: tuple[torch.Tensor, Staging], count: int) -> None:
    kv, made = staged
    blocks = list(range(COUNT - 1, COUNT - 1 - count, -1))

    def store(first: int, memory: Sequence[memoryview]) -> list[tuple[int, bytes]]:
        return [(first + place, bytes(one)) for place, one in enumerate(memory)]

    written = made.write(blocks, made.mark(), store)
    assert written == [(place, data(kv[block])) for place, block in enumerate(blocks)]


@pytest.mark.parametrize(("count", "there"), [(0, 0), (1, 1), (9, 9), (23, 23), (23, 0), (23, 4), (23, 6), (23, 22)])
def test_leading_blocks_that_were_loaded_are_in_place_and_no_other_is_touched(
    staged: tuple[torch.Tensor, Staging], count: int, there: int
) -> None:
    kv, made = staged
    before, blocks = kv.clone(), list(range(COUNT))[::-1][:count]

    def load(first: int, memory: Sequence[memoryview]) -> int:
        num = max(0, min(there - first, len(memory)))
        for place in range(num):
            memory[place][:] = bytes([first + place]) * LAYOUT.block_bytes
        return num

    assert made.read(blocks, made.mark(), load) == there
    for place, block in enumerate(blocks):
        expected = bytes([place]) * LAYOUT.block_bytes if place < there else data(before[block])
        assert data(kv[block]) == expected


@pytest.mark.parametrize("staged", [WINDOWED], indirect=True)
@pytest.mark.parametrize(("part", "where"), [("entries", slice(0, 8)), ("state", slice(8, 40))])
@pytest.mark.parametrize("direct", [False, True])
def test_a_part_of_each_block_comes_and_goes_and_the_rest_stays(
    staged: tuple[torch.Tensor, Staging], part: str, where: slice, direct: bool
) -> None:
    kv, made = staged
    made._is_direct = direct and DEVICE == "cpu"
    before, blocks = kv.clone(), [7, 2, 19, 11, 3, 0]
    stored = made.write(blocks, made.mark(), lambda first, memory: [bytes(one) for one in memory], part)
    assert stored == [data(kv[block, where]) for block in blocks]

    def load(first: int, memory: Sequence[memoryview]) -> int:
        for place, one in enumerate(memory):
            one[:] = stored[len(blocks) - 1 - first - place]
        return len(memory)

    assert made.read(blocks, made.mark(), load, part) == len(blocks)
    for block, of in zip(blocks, reversed(blocks), strict=True):
        before[block, where] = torch.frombuffer(bytearray(stored[blocks.index(of)]), dtype=torch.float32)
    assert torch.equal(kv, before)
