"""cuda_ipc between an owner and takers with stand-ins for their GPUs: what is mapped, written, refused, given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flowinfer.errors import FlowInferError
from flowinfer.message import KVPushed
from flowinfer.transfer import cuda_ipc, pushing
from flowinfer.transfer.cuda_ipc import CudaIpcReceiver, CudaLinks, PoolAddress
from flowinfer.transfer.pushing import LinkSender
from flowinfer.transfer.transport import Push, Stopped, TransferError, Written

NUM_BLOCKS, BLOCK_BYTES = 8, 4
memories: dict[bytes, NDArray[np.uint8]] = {}  # of all processes, by handle


class Copying:
    """Under way until `finish`, which writes."""

    def __init__(self, mapped: bytes, write: Callable[[], None]) -> None:
        self.mapped, self.write, self.done, self.failed = mapped, write, False, False

    def finish(self) -> None:
        if not self.done:
            self.write()
            self.done = True

    def query(self) -> bool:
        if self.failed:
            raise TransferError("the link broke.")
        return self.done

    def synchronize(self) -> None:
        self.finish()


class Gpu:
    """Memory of one process. at_once: copies are done when they are asked for."""

    def __init__(self, name: str, *, at_once: bool = True, works: bool = True) -> None:
        self.handle, self.at_once, self.works = name.encode(), at_once, works
        self.pool = memories[self.handle] = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.under_way: deque[Copying] = deque()
        self.log: list[str] = []
        self.num_rests = 0

    def export(self) -> tuple[bytes, int, bytes]:
        return self.handle, 64, b""

    def rest(self) -> None:
        self.num_rests += 1

    def open(self, address: PoolAddress) -> bytes:
        if not self.works:
            raise FlowInferError("cuIpcOpenMemHandle failed: no.")
        self.log.append(f"open {address.handle.decode()}")
        return address.handle

    def close(self, mapped: bytes) -> None:
        assert all(copy.done for copy in self.under_way if copy.mapped == mapped), "unmapped under a copy"
        self.log.append(f"close {mapped.decode()}")

    def mark(self) -> None:
        return None

    def copy(self, mapped: bytes, ids: NDArray[np.int32], mark: None) -> Copying:
        to, of = ids.T

        def write() -> None:
            memories[mapped][to] = self.pool[of]

        copying = Copying(mapped, write)
        self.under_way.append(copying)
        if self.at_once:
            copying.finish()
        return copying

    def finish(self) -> None:
        for copy in self.under_way:
            copy.finish()

    def fail(self) -> None:
        for copy in self.under_way:
            copy.failed = copy.failed or not copy.done
            copy.done = True


class Owner:
    """A sender in a worker whose background work is done by `turn`."""

    def __init__(self, **more: bool) -> None:
        self.gpu = Gpu("owner", **more)
        self.gpu.pool[:] = np.arange(NUM_BLOCKS)[:, None] + 1
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any], Any]]] = deque()
        context = SimpleNamespace(submit=lambda fn, then: self.jobs.append((fn, then)))
        engine: Any = SimpleNamespace(layout=SimpleNamespace(block_bytes=BLOCK_BYTES), ctx=context, kv=self.gpu.pool)
        self.sender = LinkSender(engine, CudaLinks(self.gpu))

    def turn(self) -> None:
        while self.jobs:
            fn, then = self.jobs.popleft()
            try:
                result = fn()
            except FlowInferError as error:
                result = error
            then(result)

    def push(self, push: Push, sources: list[int], first: int = 0, *, last: bool = True) -> None:
        self.sender.push(push, first, sources, last=last)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "PATIENCE_S", 0.0)


def taker(name: str = "taker", generation: int = 1, ticket: int = 1, targets: tuple[int, ...] = (5, 2)) -> Push:
    """What a taker with a pool of its own asks for."""
    gpu = Gpu(f"{name}/{generation}")
    layout = SimpleNamespace(block_bytes=BLOCK_BYTES)
    receiver = CudaIpcReceiver(SimpleNamespace(layout=layout, kv=gpu.pool), gpu)  # type: ignore[arg-type]
    return Push("r", ticket, name, generation, receiver.address(), targets)


def test_blocks_lie_where_the_taker_wanted_them_and_nowhere_else() -> None:
    owner, push = Owner(), taker(targets=(5, 2, 7))
    owner.push(push, [3, 0], last=False)
    owner.turn()
    owner.push(push, [6], first=2)
    assert owner.sender.progress() == [Written(1, 0, [0, 0]), Written(1, 2, [0])] and not owner.sender.pending
    assert memories[b"taker/1"][:, 0].tolist() == [0, 0, 1, 0, 0, 4, 0, 7]


def test_a_pool_is_mapped_once_in_the_life_of_its_worker() -> None:
    owner, push = Owner(), taker()
    for ticket in range(3):
        owner.push(Push("r", ticket, push.to, 1, push.address, push.targets), [0, 1])
        owner.turn()
    assert owner.gpu.log == ["open taker/1"]


def test_a_push_of_nothing_opens_the_way_and_no_more_is_said_of_it() -> None:
    owner, push = Owner(), taker()
    owner.push(push, [], last=False)
    owner.turn()
    assert owner.gpu.log == ["open taker/1"] and not owner.sender.pending and not owner.gpu.under_way
    owner.push(push, [3, 0])
    assert owner.sender.progress() == [Written(1, 0, [0, 0])] and owner.gpu.log == ["open taker/1"]


def test_what_is_pushed_while_the_pool_is_being_mapped_follows_in_order() -> None:
    owner, push = Owner(), taker()
    owner.push(push, [3], last=False)
    owner.push(push, [0], first=1)
    assert owner.sender.pending and owner.sender.progress() == []
    owner.turn()
    assert owner.sender.progress() == [Written(1, 0, [0]), Written(1, 1, [0])]


def test_a_pool_that_cannot_be_mapped_stops_its_tickets_and_the_next_one_tries_again() -> None:
    owner, push = Owner(works=False), taker()
    owner.push(push, [3, 0])
    owner.turn()
    assert owner.sender.progress() == [Stopped(1, "cuIpcOpenMemHandle failed: no.")] and not owner.sender.pending
    owner.gpu.works = True
    owner.push(push, [3, 0])
    owner.turn()
    assert owner.sender.progress() == [Written(1, 0, [0, 0])]


def test_a_successor_gets_a_mapping_of_its_own_and_its_predecessor_is_refused() -> None:
    owner, first = Owner(), taker()
    owner.push(first, [3, 0])
    owner.turn()
    second = taker(generation=2, ticket=2)
    owner.push(second, [3, 0])
    owner.turn()
    assert owner.gpu.log == ["open taker/1", "close taker/1", "open taker/2"]
    with pytest.raises(TransferError, match="taker of generation 1 is gone"):
        owner.push(first, [3, 0])


def test_a_dead_taker_is_forgotten_and_unmapped_only_when_nothing_is_under_way() -> None:
    owner, push = Owner(at_once=False), taker()
    owner.push(push, [3, 0])
    owner.turn()
    owner.sender.forget("taker")
    owner.turn()
    assert owner.gpu.log == ["open taker/1"]
    owner.gpu.finish()
    assert owner.sender.progress() == []
    owner.turn()
    assert owner.gpu.log == ["open taker/1", "close taker/1"] and not owner.sender.pending


def test_a_taker_that_dies_while_its_pool_is_being_mapped_is_unmapped_again() -> None:
    owner = Owner()
    owner.push(taker(), [3, 0])
    owner.sender.forget("taker")
    owner.turn()
    assert owner.gpu.log == ["open taker/1", "close taker/1"]
    assert owner.sender.progress() == [] and not memories[b"taker/1"].any()


@pytest.mark.parametrize("state", ["mapping", "copying", "written"])
def test_a_cancelled_ticket_is_over_at_once_or_once_its_copies_are(state: str) -> None:
    owner, push = Owner(at_once=state == "written"), taker()
    owner.push(push, [3, 0])
    if state != "mapping":
        owner.turn()
    assert owner.sender.cancel(1) is (state != "copying")
    owner.turn()
    owner.gpu.finish()
    assert owner.sender.progress() == ([Stopped(1)] if state == "copying" else []) and not owner.sender.pending
    assert memories[b"taker/1"].any() == (state != "mapping")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"host": "elsewhere"}, "runs on another host"),
        ({"block_bytes": 8}, "blocks of taker have 8 bytes, and ours 4"),
        ({"num_blocks": 5}, "which its pool doesn't have"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_reason(wrong: dict[str, Any], said: str) -> None:
    owner, push = Owner(), taker()
    address = msgspec.msgpack.decode(push.address, type=PoolAddress)
    other = msgspec.msgpack.encode(msgspec.structs.replace(address, **wrong))
    with pytest.raises(TransferError, match=said):
        owner.push(Push("r", 1, "taker", 1, other, push.targets), [0, 1])
    assert owner.sender.cancel(1) and not memories[b"taker/1"].any()


def test_garbage_instead_of_an_address_is_refused() -> None:
    with pytest.raises(TransferError, match="doesn't say where its pool is"):
        Owner().push(Push("r", 1, "taker", 1, b"\x00", (0,)), [0])


def test_each_request_waits_for_what_the_takers_device_still_does() -> None:
    gpu = Gpu("one")
    engine: Any = SimpleNamespace(layout=SimpleNamespace(block_bytes=BLOCK_BYTES), kv=gpu.pool)
    receiver = CudaIpcReceiver(engine, gpu)
    assert receiver.address() == receiver.address() and gpu.num_rests == 2


def test_the_word_of_the_owner_brings_no_bytes() -> None:
    gpu = Gpu("one")
    engine: Any = SimpleNamespace(layout=SimpleNamespace(block_bytes=BLOCK_BYTES), kv=gpu.pool)
    said = KVPushed(id="r", ticket=1, first=2, checks=[0, 0, 0])
    assert list(CudaIpcReceiver(engine, gpu).land(said, [9] * 8)) == [2, 3, 4]


def test_without_a_gpu_both_halves_say_so() -> None:
    engine: Any = SimpleNamespace(kv=SimpleNamespace(device=SimpleNamespace(type="cpu")))
    for make in (cuda_ipc.make_sender, cuda_ipc.make_receiver):
        with pytest.raises(TransferError, match="needs a GPU"):
            make(engine)


def test_a_link_that_breaks_stops_all_its_tickets_and_the_next_request_makes_another() -> None:
    owner, push = Owner(at_once=False), taker()
    second = Push("r", 2, push.to, 1, push.address, push.targets)
    owner.push(push, [3], last=False)
    owner.turn()
    owner.push(second, [3, 0])
    owner.gpu.fail()
    assert owner.sender.progress() == [Stopped(1, "the link broke."), Stopped(2, "the link broke.")]
    owner.turn()
    owner.gpu.at_once = True
    owner.push(push, [3, 0])
    owner.turn()
    assert owner.sender.progress() == [Written(1, 0, [0, 0])]
    assert owner.gpu.log == ["open taker/1", "close taker/1", "open taker/1"]


ACTIONS = ["push", "push", "push", "turn", "finish", "cancel", "forget", "progress", "fail"]
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), max_size=40)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_every_ticket_is_written_stopped_or_given_up_and_no_mapping_is_left(script: list[tuple[str, int]]) -> None:
    owner = Owner(at_once=False)
    pushes = [taker(f"t{n}", ticket=0) for n in range(3)]
    lives = [1, 1, 1]
    of: dict[int, int] = {}  # tickets that somebody waits for: for their blocks, or for their end
    stopping: set[int] = set()
    said: list[Written | Stopped] = []
    for ticket, (what, n) in enumerate(script, 1):
        if what == "push":
            push = pushes[n]
            owner.push(Push("r", ticket, push.to, push.generation, push.address, push.targets), [1, 2])
            of[ticket] = n
        elif what == "turn":
            owner.turn()
        elif what == "finish":
            owner.gpu.finish()
        elif what == "fail":
            owner.gpu.fail()
        elif what == "cancel" and (waited := sorted(set(of) - stopping)):
            given_up = waited[n % len(waited)]
            if owner.sender.cancel(given_up):
                del of[given_up]
            else:
                stopping.add(given_up)
        elif what == "forget":
            owner.sender.forget(f"t{n}")
            lives[n] += 1
            pushes[n] = taker(f"t{n}", generation=lives[n], ticket=0)
            of = {ticket: to for ticket, to in of.items() if to != n}
        said += _heard(owner, of)
    while owner.sender.pending or owner.jobs:
        owner.turn()
        owner.gpu.finish()
        said += _heard(owner, of)
    assert not of
    assert not any(isinstance(news, Written) and news.ticket in stopping for news in said)
    owner.sender.close()
    opened = sum(line.startswith("open") for line in owner.gpu.log)
    assert opened == sum(line.startswith("close") for line in owner.gpu.log)


def _heard(owner: Owner, of: dict[int, int]) -> list[Written | Stopped]:
    """What the sender says, once for each ticket that somebody waits for and for no other."""
    said = list(owner.sender.progress())
    for news in said:
        del of[news.ticket]
    return said
