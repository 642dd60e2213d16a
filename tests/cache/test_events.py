"""Block events as a reader of the public format gets them, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.cache.events import BlockEvents
from flowinfer.channel import Publisher
from flowinfer.errors import TransportError
from flowinfer.message import Ids

NAMES = [bytes(8) + number.to_bytes(8, "big") for number in range(1, 9)]
TOKENS: Ids = np.arange(32, dtype=np.int32)


class Reader:
    """Collects what is sent."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, Any]] = []
        self.events = BlockEvents(4, lambda owner, batch: self.batches.append((owner, decoded(batch))), lambda: 7.5)


def decoded(batch: bytes) -> Any:
    return msgspec.msgpack.decode(batch)


def test_a_run_of_blocks_is_one_event_with_its_tokens() -> None:
    reader = Reader()
    reader.events.seen(NAMES[:3], TOKENS)
    reader.events.stored("prefill.0", NAMES[:2])
    reader.events.stored("prefill.1", NAMES[2:3])
    assert reader.batches == [
        ("prefill.0", [7.5, [["BlockStored", [1, 2], None, list(range(8)), 4, None, "GPU"]], 0]),
        ("prefill.1", [7.5, [["BlockStored", [3], 2, [8, 9, 10, 11], 4, None, "GPU"]], 1]),
    ]


class Stored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    """As vLLM 0.33 has it, up to the fields that have defaults there; it can't do without these."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    """As vLLM 0.33 has it."""

    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    """As vLLM 0.33 has it."""


class Batch(msgspec.Struct, array_like=True):
    """As vLLM 0.33 has it."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


def test_as_maps_events_are_those_of_the_newest_engines() -> None:
    batches: list[Batch] = []
    events = BlockEvents(
        4, lambda owner, batch: batches.append(msgspec.msgpack.decode(batch, type=Batch)), lambda: 7.5, "map"
    )
    events.seen(NAMES[:2], TOKENS)
    events.stored("prefill.0", NAMES[:2])
    events.removed("prefill.0", NAMES[1:2])
    events.cleared("prefill.0")
    assert batches == [
        Batch(7.5, [Stored([1, 2], None, list(range(8)), 4, None, "GPU", None)], 0),
        Batch(7.5, [Removed([2], "GPU")], 0),
        Batch(7.5, [Cleared()], 0),
    ]


@pytest.mark.parametrize(("owner", "medium"), [("prefill.0", "GPU"), ("disk", "DISK"), ("object", "EXTERNAL")])
def test_readers_learn_in_which_tier_a_block_lies(owner: str, medium: str) -> None:
    reader = Reader()
    reader.events.seen(NAMES[:1], TOKENS)
    reader.events.stored(owner, NAMES[:1])
    reader.events.removed(owner, NAMES[:1])
    assert [batch[1][1][0][-1] for batch in reader.batches] == [medium, medium]


def test_what_nobody_has_named_yet_is_told_when_a_prompt_names_it() -> None:
    reader = Reader()
    reader.events.stored("decode.0", NAMES[:2])
    assert reader.batches == []
    reader.events.seen(NAMES[:2], TOKENS)
    assert [batch[1][1][0][:2] for batch in reader.batches] == [["BlockStored", [1, 2]]]


def test_only_what_was_told_is_taken_back() -> None:
    reader = Reader()
    reader.events.seen(NAMES[:1], TOKENS)
    reader.events.stored("disk", NAMES[:2])
    reader.events.removed("disk", NAMES[:2])
    reader.events.cleared("disk")
    assert [batch[1][1] for batch in reader.batches][1:] == [[["BlockRemoved", [1], "DISK"]]]


def test_a_dead_worker_is_cleared_once() -> None:
    reader = Reader()
    reader.events.seen(NAMES[:1], TOKENS)
    reader.events.stored("prefill.0", NAMES[:1])
    reader.events.cleared("prefill.0")
    reader.events.cleared("prefill.0")
    assert [batch[1][1] for batch in reader.batches][1:] == [[["AllBlocksCleared"]]]


@given(st.lists(st.tuples(st.sampled_from(["seen", "stored", "removed", "cleared"]), st.integers(0, 7)), max_size=40))
@settings(max_examples=60)
def test_a_reader_knows_what_is_held_as_far_as_prompts_named_it(steps: list[tuple[str, int]]) -> None:
    reader, held, named = Reader(), set[int](), set[int]()
    for action, count in steps:
        names = NAMES[: count + 1]
        if action == "seen":
            reader.events.seen(names, TOKENS)
            named |= set(range(1, count + 2))
        elif action == "cleared":
            reader.events.cleared("w")
            held.clear()
        else:
            getattr(reader.events, action)("w", [NAMES[count]])
            (held.add if action == "stored" else held.discard)(count + 1)
    believed: set[int] = set()
    for _, (_, events, _) in reader.batches:
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                believed.clear()
            else:
                (believed.update if kind == "BlockStored" else believed.difference_update)(fields[0])
    assert believed == held & named


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(0, 0, keep=3)
    publisher.open()
    yield publisher
    publisher.close()


def test_a_subscriber_gets_topic_number_and_payload(publisher: Publisher) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger = 0
        reader.connect(f"tcp://127.0.0.1:{publisher.port}")
        reader.subscribe(b"kv@prefill.0")
        for number in range(500):  # until the subscription has arrived
            publisher.publish("kv@decode.0@m", b"not asked for")
            publisher.publish("kv@prefill.0@m", str(2 * number + 1).encode())
            if reader.poll(10):
                break
        topic, number_bytes, payload = reader.recv_multipart()
        assert topic == b"kv@prefill.0@m" and int.from_bytes(number_bytes, "big") == int(payload)


def test_missed_batches_are_repeated_from_the_number_asked_for(publisher: Publisher) -> None:
    for number in range(5):
        publisher.publish("kv", str(number).encode())
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.linger = 0
        reader.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        reader.send_multipart((b"", (3).to_bytes(8, "big")))
        for _ in range(500):
            publisher.answer()
            if reader.poll(10):
                break
        answers = [reader.recv_multipart()[1:] for _ in range(3)]
    assert answers == [[(n).to_bytes(8, "big"), str(n).encode()] for n in (3, 4)] + [[Publisher.END, b""]]


def test_a_taken_port_is_told_and_a_shared_one_stays_until_the_last_leaves(publisher: Publisher) -> None:
    publisher.open()
    publisher.close()
    with pytest.raises(TransportError, match=f"port {publisher.port}"):
        Publisher(publisher.port, 0).open()
