"""Blocks that are pushed while prefill computes: whatever becomes of them, answers are right and no block is lost."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from cluster import Cluster, prompt
from decode_loop import save_random_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.message import Event, Failure, Finish, KVData, KVFetch, KVOffer, KVPushed, KVStopped, Prompt, WorkerDown
from flowinfer.observe import metrics
from flowinfer.runtime.clock import FakeClock
from flowinfer.stages.kv_transfer.policy import early_way
from flowinfer.transfer import incoming, outgoing
from flowinfer.transfer.memory import PoolMemory
from flowinfer.transfer.transport import DamagedBlock, Push, Stopped, TransferError, Written

VOCAB, CONTEXT = 96, 512
LENGTHS = (1, 64, 65, 200, 330)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, VOCAB, CONTEXT)
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def begin(**options: Any) -> Cluster:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Cluster(model, folder, **{"shared": False, **options}))
        return made[-1]

    yield begin
    for cluster in made:
        cluster.close()


@pytest.fixture(scope="module")
def lossy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One that gives up on blocks soon; for all examples of a property."""
    cluster = Cluster(model, tmp_path_factory.mktemp("lossy"), shared=False, transfer={"deadline": "40ms"})
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the prompts give when nothing is transferred: the blocks are read where they lie."""
    cluster = Cluster(model, tmp_path_factory.mktemp("still"))
    wanted = prompts("r")
    cluster.send(*wanted)
    answers = cluster.finish(p.id for p in wanted)
    cluster.close()
    return [answers[p.id] for p in wanted]


def some(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB), k=length)


def prompts(name: str, lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    """The same ones for each name, of which no two share a cached block."""
    made = [prompt(f"{name}-{length}", some(length), max_tokens=12) for length in lengths]
    for one in made:
        one.cache_salt = name
    return made


def intercept(
    cluster: Cluster, name: str, kind: type[Event], take: Callable[[Any, Callable[[Any], None]], None]
) -> None:
    """Lets `take` decide which events of this kind the worker hears: those that it gives to its second argument."""
    worker: Any = cluster.workers[name]
    hear = worker.handle
    worker.handle = lambda event: take(event, hear) if isinstance(event, kind) else hear(event)


def is_clean(cluster: Cluster) -> bool:
    return all(is_free(cluster.engine(name)) for name in cluster.workers if not name.startswith("front"))


def is_free(engine: Any) -> bool:
    return not engine.held and engine.pool.num_free == engine.pool.num_blocks


def counted(name: str, **labels: str) -> float:
    return sum(
        value
        for sample, its, value in metrics.snapshot()
        if sample == f"flowinfer:{name}" and all(its.get(k) == v for k, v in labels.items())
    )


def ticking(clock: FakeClock, claim: Callable[[], bool]) -> Callable[[], bool]:
    """Time passes a little with each look, for what is asked again after a while."""

    def look() -> bool:
        clock.advance(1e-4)
        return claim()

    return look


def noting(notes: list[Any], of: str) -> Callable[[Any, Callable[[Any], None]], None]:
    """For `intercept`: lets all pass, and notes a field of each."""

    def take(event: Any, hear: Callable[[Any], None]) -> None:
        notes.append(getattr(event, of))
        hear(event)

    return take


class Faults:
    """Does one thing with each block that comes: lets it pass, loses it, or has it come twice, late or damaged."""

    def __init__(self, plan: Sequence[str]) -> None:
        self.plan, self.later = deque(plan), deque[tuple[int, KVData, Any]]()
        self.turn = 0

    def take(self, event: KVData, hear: Callable[[Any], None]) -> None:
        fault = self.plan.popleft() if self.plan else "pass"
        if fault == "damage":
            event = msgspec.structs.replace(event, data=event.data[::-1].copy())
        if fault == "later":
            self.later.append((self.turn + 3, event, hear))
        elif fault != "lose":
            hear(event)
            if fault == "twice":
                hear(event)

    def deliver(self) -> None:
        """What is late comes, each by another turn, the last ones first."""
        self.turn += 1
        for due in [entry for entry in reversed(self.later) if entry[0] <= self.turn]:
            self.later.remove(due)
            due[2](due[1])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(st.sampled_from(["pass", "pass", "pass", "lose", "twice", "later", "damage"]), max_size=14))
def test_lost_doubled_late_and_damaged_blocks_change_no_answer(
    lossy: Cluster, expected: list[list[int]], plan: list[str]
) -> None:
    faults, worker = Faults(plan), lossy.workers["decode.0"]
    intercept(lossy, "decode.0", KVData, faults.take)
    wanted = prompts(f"e{len(lossy.door.ended)}")
    lossy.send(*wanted)

    def is_over() -> bool:
        faults.deliver()
        return all(one.id in lossy.door.ended for one in wanted) and is_clean(lossy) and not faults.later

    lossy.until(is_over)
    del worker.handle
    assert all(isinstance(lossy.door.ended[one.id], Finish) for one in wanted)
    assert [lossy.door.answer(one.id) for one in wanted] == expected


def test_each_block_is_pushed_with_the_chunk_that_fills_it(start: Any) -> None:
    cluster = start()
    prefill, engine = cluster.workers["prefill.0"].by_name["prefill"].stage, cluster.engine("prefill.0")
    plan, pushed = prefill.scheduler.plan, []
    prefill.scheduler.plan = lambda *budget: plan(*budget) if engine.outgoing._transfers else []
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: "r-330" in engine.outgoing._transfers)
    while "r-330" in prefill.prompts:
        pushed.append((engine.held["r-330"].num_computed // 64, engine.outgoing._transfers["r-330"].num_pushed))
        cluster.turn()
    assert len(pushed) >= 3 and all(computed == sent for computed, sent in pushed), pushed
    cluster.until(lambda: bool(cluster.door.ended) and is_clean(cluster))


@pytest.mark.parametrize("restores", [False, True])
def test_cached_blocks_are_pushed_before_the_rest_is_computed(start: Any, restores: bool) -> None:
    """restores: blocks are still being read from a lower tier when the taker asks."""
    cluster = start()
    prefill, engine = cluster.workers["prefill.0"].by_name["prefill"].stage, cluster.engine("prefill.0")
    cluster.send(prompt("a", some(330)[:200], max_tokens=1))
    cluster.finish(["a"])
    cluster.engine("decode.0").pool.clear_cache()
    prefill.scheduler.plan = lambda *budget: []
    prefill._restore = lambda prompt, held: restores
    cluster.send(prompt("b", some(330), max_tokens=1))
    if restores:
        cluster.until(lambda: "b" in engine.outgoing._transfers)
        prefill.ctx.call_at(0.0, lambda: prefill._schedule(prefill.prompts["b"], engine.held["b"]))
    arrivals = cluster.workers["decode.0"].by_name["transfer"].stage.incoming.arrivals
    cluster.until(lambda: "b" in arrivals and arrivals["b"].num_leading == 3)
    assert engine.held["b"].num_computed == 3 * 64
    del prefill.scheduler.plan
    cluster.until(lambda: "b" in cluster.door.ended and is_clean(cluster))


def test_what_the_decoding_worker_has_is_not_pushed_again(start: Any) -> None:
    cluster, pushed = start(), []
    intercept(cluster, "decode.0", KVData, noting(pushed, "index"))
    first = prompt("a", some(200), max_tokens=60)
    cluster.send(first)
    answer = cluster.finish(["a"])["a"]
    assert sorted(pushed) == [0, 1, 2, 3]
    pushed.clear()
    cluster.send(prompt("b", [*some(200), *answer, 5, 6, 7], max_tokens=8))
    cluster.finish(["b"])
    assert sorted(pushed) == [4], "four blocks of the first turn are whole, the last of them by decode's own tokens"
    cluster.until(lambda: is_clean(cluster))


def test_a_block_of_an_earlier_try_is_refused_and_counted(start: Any, expected: list[list[int]]) -> None:
    cluster, kept = start(), []
    before = counted("transfer_refused_blocks_total", reason="ticket")

    def with_old_ones(event: KVData, hear: Any) -> None:
        hear(msgspec.structs.replace(event, ticket=event.ticket - 1, data=event.data[::-1].copy()))
        kept.append(event)
        hear(event)

    intercept(cluster, "decode.0", KVData, with_old_ones)
    wanted = prompts("r")
    cluster.send(*wanted)
    assert list(cluster.finish(one.id for one in wanted).values()) == expected
    cluster.until(lambda: is_clean(cluster))
    assert counted("transfer_refused_blocks_total", reason="ticket") == before + len(kept)


def test_a_block_that_comes_twice_is_counted(start: Any) -> None:
    cluster, before = start(), counted("transfer_refused_blocks_total")
    intercept(cluster, "decode.0", KVData, Faults(["twice"] * 4).take)
    cluster.send(*prompts("r", [200]))
    cluster.finish(["r-200"])
    assert counted("transfer_refused_blocks_total") == before + 4


def test_a_block_is_not_pushed_before_it_is_full(start: Any, expected: list[list[int]]) -> None:
    cluster = start()
    cluster.workers["prefill.0"].by_name["prefill"].stage.scheduler.token_budget = 48
    wanted = prompts("r")
    cluster.send(*wanted)
    assert list(cluster.finish(one.id for one in wanted).values()) == expected


@pytest.mark.parametrize("turns", [1, 2, 4, 6, 9])
def test_a_cancel_frees_the_blocks_of_both_ends_in_a_few_turns(start: Any, turns: int) -> None:
    cluster = start()
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: bool(cluster.engine("prefill.0").held))
    cluster.turn(turns)
    cluster.cancel("r-330")
    cluster.turn(6)
    assert is_clean(cluster)


@pytest.mark.parametrize("turns", [1, 3, 5, 8])
def test_when_the_owner_dies_what_was_to_come_is_free_at_once(
    start: Any, expected: list[list[int]], turns: int
) -> None:
    cluster = start()
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: bool(cluster.engine("prefill.0").held))
    cluster.turn(turns)
    cluster.kill("prefill.0")
    assert not cluster.workers["decode.0"].by_name["transfer"].stage.incoming.arrivals
    cluster.until(lambda: bool(cluster.door.ended) and is_clean(cluster))
    assert isinstance(cluster.door.ended["r-330"], str) or cluster.door.answer("r-330") == expected[-1]


@pytest.mark.parametrize("turns", [1, 3, 5, 8])
def test_when_the_taker_dies_another_one_gets_the_blocks(start: Any, expected: list[list[int]], turns: int) -> None:
    cluster = start()
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: bool(cluster.engine("prefill.0").held))
    cluster.turn(turns)
    known = cluster.kill("decode.0")
    cluster.add("decode.1")
    cluster.until(lambda: bool(cluster.door.ended) and is_clean(cluster))
    failed = isinstance(cluster.door.ended["r-330"], str | Failure)
    assert not failed or "r-330" not in known
    assert failed or cluster.door.answer("r-330") == expected[-1]


@pytest.mark.parametrize(
    ("trait", "value"), [("block_tokens", 128), ("dtype", "bfloat16"), ("tensor_parallel", 2), ("model", "other")]
)
def test_other_layouts_are_refused_before_anything_is_computed(start: Any, trait: str, value: Any) -> None:
    cluster = start()
    engine = cluster.engine("decode.0")
    mine, engine.layout = engine.layout, msgspec.structs.replace(engine.layout, **{trait: value})
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: bool(cluster.door.ended))
    engine.layout = mine
    failure = cluster.door.ended["r-330"]
    assert isinstance(failure, Failure)
    theirs = getattr(mine, trait)
    for words in (
        f"prefill.0 computes keys and values with {trait} {theirs}",
        f"decode.0 reads them with {trait} {value}",
    ):
        assert words in failure.message
    cluster.turn(6)
    assert is_clean(cluster)


def test_without_room_the_blocks_are_asked_for_when_the_sequence_has_come(
    start: Any, expected: list[list[int]]
) -> None:
    cluster, asked = start(), []
    intercept(cluster, "prefill.0", KVFetch, noting(asked, "id"))
    pool = cluster.engine("decode.0").pool
    taken = pool.allocate(pool.num_free)
    wanted = prompts("r")
    cluster.send(*wanted)
    cluster.until(lambda: len(cluster.workers["decode.0"].by_name["transfer"].stage.crowded) == len(wanted) - 1)
    assert not asked, "a prompt of one token has no KV, and there's no room for others"
    pool.release(taken)
    assert list(cluster.finish(one.id for one in wanted).values()) == expected
    cluster.until(lambda: is_clean(cluster))


def test_blocks_that_stay_away_are_waited_for_until_the_deadline_and_then_computed(
    start: Any, expected: list[list[int]]
) -> None:
    clock, before = FakeClock(), counted("transfer_failures_total", reason="late")
    cluster = start(clock=clock, transfer={"deadline": "3s"})
    intercept(cluster, "decode.0", KVData, lambda event, hear: hear(event) if event.index < 2 else None)
    arrivals = cluster.workers["decode.0"].by_name["transfer"].stage.incoming.arrivals
    cluster.send(*prompts("r", [330]))
    cluster.until(ticking(clock, lambda: any(arrival.sequence for arrival in arrivals.values())))
    clock.advance(2.9)
    cluster.turn(5)
    assert arrivals and not cluster.door.ended
    clock.advance(0.2)
    cluster.turn(1)
    assert not arrivals and cluster.engine("decode.0").held["r-330"].num_computed == 2 * 64, "what has come is kept"
    cluster.until(ticking(clock, lambda: bool(cluster.door.ended) and is_clean(cluster)))
    assert cluster.door.answer("r-330") == expected[-1]
    assert counted("transfer_failures_total", reason="late") == before + 1


def test_how_long_decode_waited_is_counted_by_transport(start: Any) -> None:
    clock, name = FakeClock(), "transfer_exposed_seconds_sum"
    cluster, kept = start(clock=clock), []
    intercept(cluster, "decode.0", KVData, lambda event, hear: kept.append((event, hear)))
    arrivals = cluster.workers["decode.0"].by_name["transfer"].stage.incoming.arrivals
    cluster.send(*prompts("r", [330]))
    cluster.until(ticking(clock, lambda: any(arrival.sequence for arrival in arrivals.values()) and len(kept) == 6))
    start_of = next(iter(arrivals.values())).sequence.kv.computed_at
    clock.advance(1.0 - (clock.now() - start_of))
    before, bytes_before = counted(name, transport="tcp"), counted("transfer_bytes_total", transport="tcp")
    for event, hear in kept:
        hear(event)
    assert counted(name, transport="tcp") == pytest.approx(before + 1.0)
    moved = counted("transfer_bytes_total", transport="tcp") - bytes_before
    assert moved == 6 * cluster.engine("decode.0").layout.block_bytes


def test_what_a_replaced_worker_still_sends_is_refused_and_counted(start: Any) -> None:
    cluster = start()
    taker, prefill = cluster.workers["decode.0"], cluster.workers["prefill.0"]
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: "r-330" in cluster.engine("prefill.0").outgoing._transfers)
    taker.handle(WorkerDown(worker="prefill.0", generation=1))  # which runs on, and knows nothing of it
    assert is_free(cluster.engine("decode.0"))
    cluster.until(lambda: not prefill.by_name["prefill"].stage.prompts)
    cluster.until(lambda: taker.num_late.get("generation", 0) >= 6)
    assert is_free(cluster.engine("decode.0"))


def test_a_cancel_of_what_waits_for_room_frees_what_its_owner_has_lent(start: Any) -> None:
    cluster = start()
    pool = cluster.engine("decode.0").pool
    taken = pool.allocate(pool.num_free)
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: bool(cluster.workers["decode.0"].by_name["transfer"].stage.crowded))
    cluster.cancel("r-330")
    cluster.until(lambda: not cluster.engine("prefill.0").held, 5)
    pool.release(taken)
    assert is_clean(cluster)


def test_an_owner_that_does_not_know_the_request_says_so(start: Any) -> None:
    cluster, heard = start(), []
    intercept(cluster, "decode.0", KVStopped, noting(heard, "reason"))
    intercept(cluster, "prefill.0", KVFetch, lambda event, hear: hear(msgspec.structs.replace(event, id="unknown")))
    cluster.send(*prompts("r", [200]))
    cluster.until(lambda: bool(heard))
    assert heard == [""]


# ------------------------------------------------------------------------ a transport that writes into the taker's pool


class Memory:
    """Both halves: writes one block a look, into the pool of the worker that an address names."""

    is_written_to = True
    engines: ClassVar[dict[str, Any]] = {}

    def __init__(self, engine: Any) -> None:
        self.engine, self.queue = engine, deque[tuple[int, int, Any, int]]()
        self.stopping: list[Stopped] = []
        Memory.engines[engine.ctx.worker] = engine

    def address(self) -> bytes:
        return str(self.engine.ctx.worker).encode()

    def push(self, push: Push, first: int, sources: Sequence[int], *, last: bool) -> None:
        for index, source in enumerate(sources, first):
            self.queue.append((push.ticket, index, (push.address.decode(), push.targets[index]), source))

    @property
    def pending(self) -> bool:
        return bool(self.queue or self.stopping)

    def progress(self) -> Sequence[Written | Stopped]:
        if self.queue:
            ticket, index, (to, target), source = self.queue.popleft()
            PoolMemory(Memory.engines[to].kv).write(target, PoolMemory(self.engine.kv).read(source))
            return [Written(ticket, index, [0])]
        told, self.stopping = self.stopping, []
        return told

    def cancel(self, ticket: int) -> bool:
        self.stopping.append(Stopped(ticket))
        return False

    def forget(self, to: str) -> None:
        self.queue.clear()

    def land(self, arrived: KVPushed, targets: Sequence[int]) -> Sequence[int]:
        return range(arrived.first, arrived.first + len(arrived.checks))

    def close(self) -> None:
        return None


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (outgoing, incoming):
        name = "make_sender" if module is outgoing else "make_receiver"
        monkeypatch.setattr(module, name, lambda name, engine: Memory(engine))


@pytest.mark.usefixtures("memory")
def test_a_transport_that_writes_by_itself_gives_the_same_answers(start: Any, expected: list[list[int]]) -> None:
    cluster, heard = start(), []
    intercept(cluster, "decode.0", KVPushed, noting(heard, "first"))
    wanted = prompts("r")
    cluster.send(*wanted)
    assert list(cluster.finish(one.id for one in wanted).values()) == expected
    assert len(heard) == sum(-(-(length - 1) // 64) for length in LENGTHS)
    cluster.until(lambda: is_clean(cluster))


@pytest.mark.parametrize(
    ("wanted", "device", "way"),
    [
        ("auto", "cpu", ""),
        ("auto", "cuda", "cuda_ipc"),
        ("cuda_ipc", "cuda", "cuda_ipc"),
        ("nixl", "cpu", "nixl"),
        ("tcp", "cuda", ""),
        ("shm", "cpu", ""),
    ],
)
def test_only_ways_that_take_long_are_opened_early(wanted: str, device: str, way: str) -> None:
    assert early_way(wanted, device) == way


@pytest.mark.usefixtures("memory")
def test_ways_that_take_long_to_open_are_opened_before_the_first_request(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, bytes, int]] = []

    def push(self: Memory, push: Push, first: int, sources: Sequence[int], *, last: bool) -> None:
        opened.append((push.to, push.address, len(sources)))

    monkeypatch.setattr(Memory, "push", push)
    cluster = start(transfer={"transport": "cuda_ipc"})
    cluster.until(lambda: bool(opened))
    cluster.turn(3)
    assert opened == [("decode.0", b"decode.0", 0)]


@pytest.mark.usefixtures("memory")
def test_blocks_that_may_still_be_written_stay_out_of_use_until_the_owner_has_stopped(start: Any) -> None:
    cluster = start()
    taker, waiting = cluster.engine("decode.0"), []
    intercept(cluster, "decode.0", KVStopped, lambda event, hear: waiting.append((event, hear)))
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: bool(taker.held))
    cluster.turn(3)
    cluster.cancel("r-330")
    cluster.until(lambda: bool(waiting))
    assert not taker.held and taker.pool.num_free == taker.pool.num_blocks - 6
    for event, hear in waiting:
        hear(event)
    assert is_clean(cluster)


@pytest.mark.usefixtures("memory")
def test_when_no_way_works_the_sequence_is_computed_and_no_block_is_kept_for_it(
    start: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(self: Memory) -> Sequence[Written | Stopped]:
        tickets = dict.fromkeys(ticket for ticket, *_ in self.queue)
        self.queue.clear()
        return [Stopped(ticket, "the link is broken") for ticket in tickets]

    monkeypatch.setattr(Memory, "progress", progress)
    cluster = start()
    wanted = prompts("r")
    cluster.send(*wanted)
    assert list(cluster.finish(one.id for one in wanted).values()) == expected
    cluster.until(lambda: is_clean(cluster), 5)


@pytest.mark.usefixtures("memory")
def test_a_written_block_that_is_damaged_keeps_no_other_out_of_use(
    start: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    land = Memory.land

    def damaged(self: Memory, arrived: KVPushed, targets: Sequence[int]) -> Sequence[int]:
        if arrived.first == 5:
            raise DamagedBlock("the last one of six")
        return land(self, arrived, targets)

    monkeypatch.setattr(Memory, "land", damaged)
    cluster = start()
    cluster.send(*prompts("r", [330]))
    assert cluster.finish(["r-330"])["r-330"] == expected[-1]
    cluster.until(lambda: is_clean(cluster), 5)


@pytest.mark.usefixtures("memory")
def test_blocks_that_a_dead_owner_may_have_been_writing_are_free(start: Any) -> None:
    cluster = start()
    taker = cluster.engine("decode.0")
    intercept(cluster, "decode.0", KVStopped, lambda event, hear: None)
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: bool(taker.held))
    cluster.turn(3)
    cluster.cancel("r-330")
    cluster.until(lambda: not taker.held)
    cluster.kill("prefill.0")
    assert taker.pool.num_free == taker.pool.num_blocks


def test_a_way_that_fails_is_followed_by_the_next(
    start: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, engine: Any) -> Memory:
        raise TransferError("no peer access")

    cluster, asked = start(), []
    monkeypatch.setattr(outgoing, "make_sender", broken)
    monkeypatch.setattr(outgoing.Outgoing, "ways", ["tcp", "tcp"])

    def asks(event: KVFetch, hear: Any) -> None:
        asked.append(event.transport)
        if len(asked) > 1:
            monkeypatch.undo()
        hear(event)

    intercept(cluster, "prefill.0", KVFetch, asks)
    cluster.send(*prompts("r", [330]))
    assert cluster.finish(["r-330"])["r-330"] == expected[-1]
    assert asked == ["tcp", "tcp"]
    cluster.until(lambda: is_clean(cluster))


def test_an_offer_that_comes_when_the_request_is_over_takes_no_block(start: Any) -> None:
    cluster, late = start(), []
    intercept(cluster, "decode.0", KVOffer, lambda event, hear: late.append((event, hear)))
    cluster.send(*prompts("r", [200]))
    cluster.finish(["r-200"])
    cluster.turn()  # decode hears that it's over
    cluster.until(lambda: is_clean(cluster))
    for event, hear in late:
        hear(event)
    cluster.turn(2)
    assert is_clean(cluster)


def test_an_offer_that_comes_behind_its_sequence_takes_nothing_from_it(start: Any, expected: list[list[int]]) -> None:
    """Offers and sequences travel by different lanes."""
    cluster, late, blocks = start(), [], []
    intercept(cluster, "decode.0", KVOffer, lambda event, hear: late.append((event, hear)))
    intercept(cluster, "decode.0", KVData, lambda event, hear: blocks.append((event, hear)))
    cluster.send(*prompts("r", [330]))
    cluster.until(lambda: len(blocks) == 6)
    for event, hear in [*late, *blocks]:
        hear(event)
    assert cluster.finish(["r-330"])["r-330"] == expected[-1]
    cluster.until(lambda: is_clean(cluster))
