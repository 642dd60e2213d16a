"""The object tier against a true S3 server and a folder: what is put is got, by any service, or is a miss."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.cache.disk.retention import Retention
from flowinfer.cache.objects.aging import ObjectLimits, Stored, victims
from flowinfer.cache.objects.client import Client, Listed
from flowinfer.cache.objects.naming import Named, parse
from flowinfer.cache.objects.store import PAUSE_S, ObjectSettings, ObjectStore
from flowinfer.cache.tiers import ObjectTierConfig
from flowinfer.cli import main
from flowinfer.errors import FlowInferError

NAMESPACE, SIZE, DAY, KEY = "0123456789abcdef", 20_000, 86_400.0, bytes(range(32))
Open = Callable[..., ObjectStore]


class Clock:
    """The time of the store and of the process, set by hand."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1.8e9, 0.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


class Memory:
    """A store in memory with the interface of Client, by a clock of its own; `broken` fails what it names."""

    url = "memory://"

    def __init__(self, clock: Clock) -> None:
        self.clock, self.objects, self.broken = clock, {}, set()  # type: ignore[var-annotated]
        self.num_puts = 0

    def _check(self, call: str) -> None:
        if call in self.broken:
            raise OSError("503 Slow Down")

    def put(self, key: str, body: Any) -> None:
        self._check("put")
        self.num_puts += 1
        self.objects[key] = (bytes(body), self.clock.wall)

    def get(self, key: str) -> memoryview:
        self._check("get")
        if key not in self.objects:
            raise FileNotFoundError(key)
        return memoryview(self.objects[key][0])

    def delete(self, keys: Sequence[str]) -> None:
        self._check("delete")
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[Listed]:
        self._check("list")
        return iter([Listed(key, len(body), at) for key, (body, at) in self.objects.items()])

    def now(self) -> float:
        self._check("list")
        return self.clock.wall


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(clock: Clock) -> Iterator[Open]:
    stores: list[ObjectStore] = []

    def open_store(client: Any, **changes: Any) -> ObjectStore:
        settings = ObjectSettings(**{"refresh_s": 1e9, **changes})
        store = ObjectStore(client, settings, monotonic=lambda: clock.monotonic)
        stores.append(store)
        store._listed.wait(10)
        return store

    yield open_store
    for store in stores:
        store.close()


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(size)))


def put(store: ObjectStore, numbers: Sequence[int], **how: Any) -> list[bytes]:
    blocks = [(name(n), payload(n)) for n in numbers]
    return store.put(blocks, **{"namespace": NAMESPACE, "cls": "chat", **how}).result(30)


def held(store: ObjectStore, numbers: Sequence[int], namespace: str = NAMESPACE) -> list[int]:
    targets = [memoryview(bytearray(SIZE)) for _ in numbers]
    found = store.get([name(n) for n in numbers], targets, namespace)
    got = [(n, target) for n, target, there in zip(numbers, targets, found, strict=True) if there]
    assert all(target == payload(n) for n, target in got)
    return [n for n, _ in got]


# ---------------------------------------------------------------------------------------------------- against servers


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of an S3 server with the bucket `kv-cache`."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    import boto3

    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    login = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **login).create_bucket(Bucket="kv-cache")
    yield endpoint
    server.stop()


@pytest.fixture(params=["file", "s3"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    if request.param == "file":
        return Client(f"file://{tmp_path}/objects")
    credentials = tmp_path / "credentials"
    credentials.write_text("[kv]\naws_access_key_id = a\naws_secret_access_key = b\n")
    options = {"endpoint": request.getfixturevalue("s3"), "region": "us-east-1", "allow_http": True}
    url = f"s3://kv-cache/{tmp_path.name}"
    return Client(url, options=options, credentials_file=str(credentials), profile="kv")


def test_what_one_service_stores_another_finds(opened: Open, client: Client) -> None:
    first, beside = opened(client), opened(client)
    assert put(first, range(5)) == [name(n) for n in range(5)]
    assert held(beside, [1]) == []
    beside.refresh()
    assert beside.contains([name(n) for n in (0, 1, 2, 9)], NAMESPACE) == 3
    assert held(beside, range(6)) == list(range(5))
    assert held(beside, [1], "another") == []
    first.close()
    assert held(opened(client, key=None), range(5)) == list(range(5))


def test_encrypted_objects_need_their_key(opened: Open, client: Client) -> None:
    store = opened(client, key=KEY)
    put(store, [1])
    assert held(store, [1]) == [1]
    (listed,) = client.list("v1")
    assert bytes(payload(1))[:64] not in bytes(client.get(listed.key))
    other = opened(client, key=bytes(32))
    assert held(other, [1]) == [] and other.counts["read_key"] == 1 and held(other, [1]) == []
    assert held(opened(client, key=KEY), [1]) == [1], "who has no key deletes nothing"


def test_blocks_are_deleted_for_all(opened: Open, client: Client) -> None:
    store = opened(client)
    put(store, range(4))
    assert store.remove([name(1), name(2), name(9)], NAMESPACE) == 2
    assert held(store, range(4)) == [0, 3] and held(opened(client), range(4)) == [0, 3]


def test_credentials_have_no_place_in_the_file(tmp_path: Path, s3: str) -> None:
    for options in ({"secret_access_key": "x"}, {"aws_access_key_id": "x"}, {"token": "x"}):
        with pytest.raises(ValueError, match="credentials don't belong into the file"):
            ObjectTierConfig(url="s3://b/p", options=options)
    with pytest.raises(ValueError, match="credentials don't belong"):
        ObjectTierConfig(url="https://me:secret@host/p")
    with pytest.raises(FlowInferError, match="no profile 'kv'"):
        (tmp_path / "c").write_text("[other]\naws_access_key_id = hunter2\n")
        Client("s3://kv-cache/x", credentials_file=str(tmp_path / "c"), profile="kv")


def test_http_must_be_allowed(s3: str, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    store = opened(Client("s3://kv-cache/x", options={"endpoint": s3, "region": "us-east-1"}, timeout_s=1))
    assert put(store, [1]) == [] and store.counts["list_io"]


# ----------------------------------------------------------------------------------------------------------- faults


def test_a_store_out_of_order_is_left_alone_for_a_while(
    opened: Open, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(clock)
    store = opened(memory)
    put(store, range(3))
    memory.broken = {"get"}
    assert held(store, [0]) == [] and store.counts["read_io"] == 1
    assert "read_io; not asked for 15 s" in caplog.text and "503 Slow Down" in caplog.text
    memory.broken = set()
    assert store.contains([name(0)], NAMESPACE) == 0 and put(store, [7]) == []
    assert store.counts["dropped_paused"] == 1
    clock.pass_by(PAUSE_S + 1)
    assert store.contains([name(0)], NAMESPACE) == 1 and held(store, range(3)) == [0, 1, 2]


def test_a_write_that_fails_is_not_there(opened: Open, clock: Clock) -> None:
    memory = Memory(clock)
    store = opened(memory)
    memory.broken = {"put"}
    assert put(store, [1]) == [] and store.counts["write_io"] == 1
    assert store.names(NAMESPACE) == []


def test_what_others_deleted_is_a_miss(opened: Open, clock: Clock) -> None:
    memory = Memory(clock)
    store = opened(memory)
    put(store, range(3))
    del memory.objects[Named(NAMESPACE, name(1), "chat", 3600, "").key]
    assert held(store, range(3)) == [0, 2] and store.counts["read_gone"] == 1
    assert store.contains([name(n) for n in range(3)], NAMESPACE) == 1
    memory.objects.clear()
    clock.pass_by(5)
    store.refresh()
    assert store.names(NAMESPACE) == []


@pytest.mark.parametrize("at", [0, 20, 60, 4095, 4096, 10_000, SIZE + 4095])
def test_a_flipped_bit_or_a_short_object_is_a_miss_and_deleted(opened: Open, clock: Clock, at: int) -> None:
    memory = Memory(clock)
    store = opened(memory)
    put(store, [1, 2])
    flipped, cut = (Named(NAMESPACE, name(n), "chat", 3600, "").key for n in (1, 2))
    body = bytearray(memory.objects[flipped][0])
    body[at] ^= 1
    memory.objects[flipped] = (bytes(body), clock.wall)
    memory.objects[cut] = (memory.objects[cut][0][:at], clock.wall)
    # header padding isn't under a checksum, and holds nothing
    assert held(store, [1, 2]) == ([1] if at == 4095 else [])
    assert cut not in memory.objects and (flipped in memory.objects) == (at == 4095)


def test_another_block_under_a_name_is_a_miss(opened: Open, clock: Clock) -> None:
    memory = Memory(clock)
    store = opened(memory)
    put(store, [1, 2])
    one, two = (Named(NAMESPACE, name(n), "chat", 3600, "").key for n in (1, 2))
    memory.objects[one] = memory.objects[two]
    assert held(store, [1]) == [] and store.counts["read_header"] == 1


def test_writes_are_bounded_and_the_rest_is_dropped(opened: Open, clock: Clock) -> None:
    memory, gate = Memory(clock), threading.Event()
    store = opened(memory, backlog=3 * SIZE)
    put_now = memory.put
    memory.put = lambda key, body: (gate.wait(30), put_now(key, body))[1]  # type: ignore[method-assign]
    blocks = [(name(n), payload(n)) for n in range(10)]
    waiting = store.put(blocks, namespace=NAMESPACE, cls="chat")
    assert store.counts["dropped_backlog"] == 7
    gate.set()
    assert len(waiting.result(30)) == 3


def test_closing_writes_what_is_pending(opened: Open, clock: Clock) -> None:
    memory = Memory(clock)
    store = opened(memory)
    waiting = store.put([(name(n), payload(n)) for n in range(40)], namespace=NAMESPACE, cls="chat")
    store.close()
    assert len(waiting.result(10)) == len(memory.objects) == 40
    assert put(store, [99]) == [] and store.counts["dropped_closed"] == 1


def test_whoever_puts_while_the_store_closes_is_answered(opened: Open, clock: Clock) -> None:
    for _ in range(20):
        store = opened(Memory(clock))
        waiting: list[Any] = []

        def put_many(store: ObjectStore = store, waiting: list[Any] = waiting) -> None:
            waiting.extend(store.put([(name(n), payload(n))], namespace=NAMESPACE, cls="chat") for n in range(60))

        putting = threading.Thread(target=put_many)
        putting.start()
        store.close()
        putting.join()
        assert all(isinstance(one.result(10), list) for one in waiting) and len(waiting) == 60


# -------------------------------------------------------------------------------------------------------- retention


def test_blocks_stay_for_their_retention_after_their_last_use(opened: Open, clock: Clock) -> None:
    memory = Memory(clock)
    store = opened(memory, retention=Retention({"chat": 7 * DAY, "agent": 3 * DAY}))
    put(store, [1, 2])
    put(store, [3], cls="agent")
    put(store, [4], keep_s=600.0)
    put(store, [5], keep_s=0)
    clock.pass_by(6 * DAY)
    store.refresh()
    assert store.contains([name(1)], NAMESPACE) == 1 and held(store, [1, 3, 4, 5]) == [1]
    store._pool.submit(lambda: None).result()
    clock.pass_by(5 * DAY)
    store.refresh()
    assert held(store, [1, 2]) == [1], "a hit renews"


def test_a_hit_on_a_young_block_writes_nothing(opened: Open, clock: Clock) -> None:
    memory = Memory(clock)
    store = opened(memory)
    put(store, [1])
    held(store, [1])
    assert put(store, [1]) == [] and memory.num_puts == 1


def test_a_longer_retention_takes_the_place_of_a_shorter_one(opened: Open, clock: Clock) -> None:
    memory = Memory(clock)
    store = opened(memory)
    put(store, [1], keep_s=60)
    put(store, [1], keep_s=DAY)
    assert [key for key in memory.objects if key != "clock"] == [Named(NAMESPACE, name(1), "chat", int(DAY), "").key]
    clock.pass_by(3600)
    store.refresh()
    assert held(store, [1]) == [1]


@pytest.mark.parametrize("leap", [-DAY, 40 * DAY])
def test_a_clock_that_leaps_deletes_nothing(opened: Open, clock: Clock, leap: float) -> None:
    memory = Memory(clock)
    store = opened(memory, retention=Retention({"chat": 7 * DAY}))
    put(store, [1])
    clock.wall += leap
    store.refresh()
    assert held(store, [1]) == [1]
    store.close()
    assert held(opened(memory, retention=Retention({"chat": 7 * DAY})), [1]) == [1]


def test_limits_hold_for_the_whole_a_class_and_a_tenant_and_the_large_pay(opened: Open, clock: Clock) -> None:
    size = SIZE + 4096
    limits = ObjectLimits(10 * size, {"agent": 2 * size}, 6 * size)
    store = opened(Memory(clock), limits=limits)
    for n in range(30):
        put(store, [n], tenant="large")
        clock.pass_by(120)
    put(store, [100, 101], tenant="small")
    put(store, range(200, 206), cls="agent")
    store.refresh()
    there = held(store, [*range(30), 100, 101, *range(200, 206)])
    assert there[:-4] == list(range(24, 30)) and there[-4:-2] == [100, 101] and len(there) == 10


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 9), st.integers(0, 999))))
def test_what_is_left_keeps_every_limit_and_nothing_goes_without_need(objects: list[tuple[str, str, int, int]]) -> None:
    stored = [
        Stored(Named("n", name(i), cls, 60, tenant), size, float(at))
        for i, (tenant, cls, size, at) in enumerate(objects)
    ]
    gone = {one.named.name for one in victims(stored, ObjectLimits(40, {"x": 20}, 25))}
    left = [one for one in stored if one.named.name not in gone]
    assert sum(one.size for one in left) <= 40
    assert sum(one.size for one in left if one.named.cls == "x") <= 20
    assert all(sum(one.size for one in left if one.named.tenant == t) <= 25 for t in "abc")
    if sum(one.size for one in stored) <= 20:
        assert not gone


@given(st.text(min_size=1, max_size=9), st.text(max_size=9), st.text(max_size=9), st.integers(0, 10**9))
def test_names_tell_what_they_were_made_of(namespace: str, cls: str, tenant: str, keep: int) -> None:
    named = Named(namespace, os.urandom(16), cls, keep, tenant)
    assert parse(named.key) == named and named.key.isascii()
    assert parse(named.key + "x/y") is None and parse("v1/" + namespace) is None


# ---------------------------------------------------------------------------------------------------- flowinfer cache


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_the_command_line_looks_at_objects_cleans_and_carries_them(
    opened: Open, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url, where = f"file://{tmp_path}/objects", []
    if kind == "s3":
        (tmp_path / "credentials").write_text("[kv]\naws_access_key_id = a\naws_secret_access_key = b\n")
        url, endpoint = f"s3://kv-cache/{tmp_path.name}", request.getfixturevalue("s3")
        where = ["--option", f"endpoint={endpoint}", "--option", "region=us-east-1", "--option", "allow_http=true"]
        where += ["--credentials", str(tmp_path / "credentials"), "--profile", "kv"]
    options = dict(option.partition("=")[::2] for option in where[1:6:2])
    credentials = str(tmp_path / "credentials") if kind == "s3" else None
    client = Client(url, options=options, credentials_file=credentials, profile="kv")
    put(opened(client), range(4))
    put(opened(client, key=KEY), [7], cls="agent", tenant="alice")

    def run(command: str, *words: str, at: str = url) -> Result:
        return CliRunner().invoke(main, ["cache", command, "--path", at, *where, *words])

    stats, tar, other = run("stats"), str(tmp_path / "x.tar"), f"{url}/other"
    assert "alice" in stats.output and "117.7 KiB" in stats.output, stats.output  # five of 20,000 + 4,096, and a tag
    assert len(run("ls", "--class", "chat").output.splitlines()) == 4
    assert run("verify").exit_code == 0 and "5 blocks written" in run("export", tar).output
    damaged = Named(NAMESPACE, name(1), "chat", 3600, "").key
    client.put(damaged, bytes(client.get(damaged))[:-1])
    found = run("verify")
    assert found.exit_code == 1 and damaged in found.output and "1 damaged" in found.output
    assert "1 blocks deleted" in run("rm", "--damaged").output and run("verify").exit_code == 0
    assert "1 blocks deleted" in run("rm", "--tenant", "alice").output
    assert held(opened(client), range(8)) == [0, 2, 3]
    assert "5 blocks taken in" in run("import", tar, at=other).output
    beside = Client(other, options=options, credentials_file=credentials, profile="kv")
    assert held(opened(beside), range(8)) == [0, 1, 2, 3] and held(opened(beside, key=KEY), [7]) == [7]


def test_a_store_that_cannot_be_had_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    options = ["--option", "endpoint=http://127.0.0.1:9", "--option", "region=x", "--credentials", str(tmp_path / "c")]
    result = CliRunner().invoke(main, ["cache", "stats", "--path", "s3://no-such/x", *options])
    assert result.exit_code == 1 and "can't be listed" in result.output and "Traceback" not in result.output
    secret = CliRunner().invoke(main, ["cache", "stats", "--path", "s3://b/x", "--option", "secret_access_key=hunter2"])
    assert secret.exit_code == 2 and "credentials" in secret.output
