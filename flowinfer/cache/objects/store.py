"""The object tier's store: put, get, contains, as the disk's. What is where is known from listings and own writes."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from flowinfer.cache.disk.io import Buffer
from flowinfer.cache.disk.retention import Retention, SteadyClock
from flowinfer.cache.objects.aging import ObjectLimits, Stored, expired, needs_renewal, victims
from flowinfer.cache.objects.body import BodyFault, pack, unpack
from flowinfer.cache.objects.client import Client
from flowinfer.cache.objects.naming import ROOT, Named, parse, whole_seconds
from flowinfer.cache.replay import leading
from flowinfer.cache.sealing import Sealer

log = logging.getLogger(__name__)
PAUSE_S = 15.0  # after a failure the store isn't asked for so long: prompts don't wait for it one after the other
FIRST_LISTING_S = 2.0  # how long the first prompts after a start wait to know what there is
CLOSING_S = 4.0  # how long a service that ends goes on writing: its supervisor waits for five seconds
Told = Callable[[Sequence[bytes], str], None]
Id = tuple[str, bytes]  # namespace and block


@dataclass(frozen=True)
class ObjectSettings:
    """threads: requests at a time.  backlog: bytes that may wait to be written; what exceeds them is dropped.

    refresh_s: time between listings.  key: encrypts blocks.
    """

    retention: Retention = field(default_factory=Retention)
    limits: ObjectLimits = field(default_factory=ObjectLimits)
    threads: int = 8
    backlog: int = 256 << 20
    refresh_s: float = 60.0
    key: bytes | None = None


class ObjectStore:
    """Blocks in an object store under 16-byte names. Thread-safe; any number of services may share the store.

    removed(names, cause) is told of what left the store, added(names, cause) of what others put there, both of the
    namespace `listens` alone where it is given, fault(cause) of all that went wrong; any thread may call them. No
    method raises for what the store does.
    """

    def __init__(
        self,
        client: Client,
        settings: ObjectSettings,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        removed: Told = lambda names, cause: None,
        added: Told = lambda names, cause: None,
        fault: Callable[[str], None] = lambda cause: None,
        listens: str | None = None,
    ) -> None:
        self.settings, self._client, self._monotonic, self._listens = settings, client, monotonic, listens
        self.counts: Counter[str] = Counter()
        self._told_removed, self._told_added, self._told_fault = removed, added, fault
        self._sealer = Sealer(settings.key) if settings.key is not None else None
        self._lock = threading.Lock()
        self._there: dict[Id, Stored] = {}
        self._foreign: set[str] = set()  # keys of objects that another key encrypts
        self._clock: SteadyClock | None = None
        self._server_ahead = 0.0  # the store's clock less ours, as of the last listing
        self._pending_bytes = 0
        self._paused_until = 0.0
        self._closing = threading.Event()
        self._listed = threading.Event()
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="object-io")
        self._writes: set[Future[bytes | None]] = set()
        self._thread = threading.Thread(target=self._refresh_all, name="object-refresh", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------------------------------------------- blocks

    def put(
        self,
        blocks: Sequence[tuple[bytes, Buffer]],
        *,
        namespace: str,
        cls: str,
        tenant: str = "",
        keep_s: float | None = None,
    ) -> Future[list[bytes]]:
        """Stores blocks behind the caller's back; the future has the names that the store has acknowledged.

        As DiskStore.put: keep_s instead of the class's retention, 0 stores nothing; the memory must not change until
        the future is done.
        """
        keep = whole_seconds(self.settings.retention.of(cls) if keep_s is None else keep_s)
        writes = [
            self._begin(Named(namespace, name, cls, keep, tenant), payload) for name, payload in blocks if keep > 0
        ]
        done: Future[list[bytes]] = Future()
        left = [write for write in writes if write is not None]
        if not left:
            done.set_result([])
            return done
        lock, waiting = threading.Lock(), [len(left)]

        def one_less(_: object) -> None:
            with lock:
                waiting[0] -= 1
                last = not waiting[0]
            if last:
                ended = [write.result() for write in left if not write.cancelled()]
                done.set_result([name for name in ended if name is not None])

        for write in left:
            write.add_done_callback(one_less)
        return done

    def contains(self, names: Sequence[bytes], namespace: str) -> int:
        """How many of the leading blocks are there, as far as is known; 0 while the store is out of order."""
        return leading(self.present(names, namespace))

    def present(self, names: Sequence[bytes], namespace: str) -> list[bool]:
        """Which of the blocks are there, as far as is known; none while the store is out of order."""
        self._listed.wait(FIRST_LISTING_S)
        if self._monotonic() < self._paused_until:
            return [False] * len(names)
        with self._lock:
            return [(namespace, name) in self._there for name in names]

    def get(self, names: Sequence[bytes], targets: Sequence[Buffer], namespace: str) -> list[bool]:
        """Reads blocks into memory of their size, some at a time; says for each whether it is there and whole."""
        with self._lock:
            known = [self._there.get((namespace, name)) for name in names]
        reads = [
            self._pool.submit(self._get_one, stored, target) if stored is not None else None
            for stored, target in zip(known, targets, strict=True)
        ]
        found = [read is not None and read.result() for read in reads]
        self._count("hits", sum(found))
        self._count("misses", known.count(None))
        return found

    def remove(self, names: Sequence[bytes], namespace: str) -> int:
        """Deletes blocks; returns how many were there."""
        with self._lock:
            there = [stored for name in names if (stored := self._there.get((namespace, name)))]
        return self._delete(there, "removed")

    def names(self, namespace: str) -> list[bytes]:
        """All blocks of a namespace that are known."""
        with self._lock:
            return [name for its, name in self._there if its == namespace]

    def close(self) -> None:
        """Writes what is pending, for a while; then lets go. Closing twice is harmless."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()  # nothing is begun from now on
            pending = list(self._writes)
        _, late = wait(pending, timeout=CLOSING_S)
        if late:
            self._count("dropped_closed", sum(write.cancel() for write in late))
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(CLOSING_S)

    # -------------------------------------------------------------------------------------------------------- writing

    def _begin(self, named: Named, payload: Buffer) -> Future[bytes | None] | None:
        if not self._is_wanted(named):
            return None
        return self._write_later(named, payload.nbytes, partial(pack, named, payload, self._sealer))

    def _is_wanted(self, named: Named) -> bool:
        """Whether the block isn't there yet, or should stay for longer than it would."""
        with self._lock:
            stored = self._there.get((named.namespace, named.name))
        if stored is None:
            return True
        return named.keep > stored.named.keep or needs_renewal(stored, self._now())

    def _write_later(
        self, named: Named, size: int, body: Callable[[], bytes | bytearray | memoryview]
    ) -> Future[bytes | None] | None:
        with self._lock:
            cause = self._refusal(size)
            if cause:
                self._count(f"dropped_{cause}", 1)
                return None
            self._pending_bytes += size
            write = self._pool.submit(self._write, named, size, body)
            self._writes.add(write)
        write.add_done_callback(self._written)
        return write

    def _written(self, write: Future[bytes | None]) -> None:
        with self._lock:
            self._writes.discard(write)

    def _refusal(self, size: int) -> str:
        if self._closing.is_set():
            return "closed"
        if self._monotonic() < self._paused_until:
            return "paused"
        return "backlog" if self._pending_bytes + size > self.settings.backlog else ""

    def _write(self, named: Named, size: int, body: Callable[[], bytes | bytearray | memoryview]) -> bytes | None:
        try:
            if self._monotonic() < self._paused_until:
                self._count("dropped_paused", 1)
                return None
            whole = body()
            self._client.put(named.key, whole)
        except OSError as error:
            self._pause("write_io", f"block {named.name.hex()}: {error}")
            return None
        except Exception as error:
            self._fault("write_error", f"block {named.name.hex()}: {type(error).__name__}: {error}")
            return None
        finally:
            with self._lock:
                self._pending_bytes -= size
        stored = Stored(named, len(whole), self._now())
        with self._lock:
            before = self._there.get((named.namespace, named.name))
            self._there[named.namespace, named.name] = stored
            self._foreign.discard(named.key)
        if before is not None and before.named.key != named.key:
            self._delete_quietly([before])  # the same block under a shorter retention
        self._count("stored", 1)
        return named.name

    # -------------------------------------------------------------------------------------------------------- reading

    def _get_one(self, stored: Stored, target: Buffer) -> bool:
        named = stored.named
        where = f"block {named.name.hex()} in {named.key}"
        if self._monotonic() < self._paused_until:
            return False
        try:
            body = self._client.get(named.key)
            unpack(named, body, target, self._sealer)
        except FileNotFoundError:
            self._fault("read_gone", where)
            self._forget([stored], "gone")
            return False
        except OSError as error:
            self._pause("read_io", f"{where}: {error}")
            return False
        except BodyFault as fault:
            self._fault(f"read_{fault.cause}", f"{where}: {fault.detail}")
            self._drop_damaged(stored, fault.cause)
            return False
        if needs_renewal(stored, self._now()):
            self._write_later(named, body.nbytes, lambda: body)
        return True

    def _drop_damaged(self, stored: Stored, cause: str) -> None:
        """What nobody can use is deleted; what has another key may be of use to another service."""
        if cause == "key":
            with self._lock:
                self._foreign.add(stored.named.key)
            self._forget([stored], "key")
        else:
            self._delete([stored], "damaged")

    # ---------------------------------------------------------------------------------------------------- housekeeping

    def refresh(self) -> None:
        """Lists the store: learns what others put there, and deletes what has expired or exceeds the limits."""
        began = self._monotonic()
        try:
            server_now = self._client.now()
            objects = [
                Stored(named, listed.size, listed.modified)
                for listed in self._client.list(ROOT)
                if (named := parse(listed.key)) is not None
            ]
        except OSError as error:
            self._pause("list_io", str(error))
            return
        newest = max((stored.modified for stored in objects), default=0.0)
        if self._clock is None:
            self._clock = SteadyClock(newest, server_now, began)
        self._server_ahead = self._clock.now(server_now, began) - began
        self._learn(objects, self._now() - (self._monotonic() - began))
        self._sweep()

    def _learn(self, objects: Sequence[Stored], began: float) -> None:
        """Takes over a listing, but for what was written while it was made (times by the store's clock)."""
        listed: dict[Id, Stored] = {}
        for stored in objects:
            id = (stored.named.namespace, stored.named.name)
            if stored.named.key not in self._foreign and not (id in listed and listed[id].modified > stored.modified):
                listed[id] = stored
        with self._lock:
            ours = {id: stored for id, stored in self._there.items() if stored.modified >= began - 1}
            gone = [id for id in self._there if id not in listed and id not in ours]
            new = [id for id in listed if id not in self._there]
            self._there = listed | ours
        self._told_removed(self._heard(gone), "gone")
        self._told_added(self._heard(new), "listed")

    def _heard(self, ids: Iterable[Id]) -> list[bytes]:
        return [name for namespace, name in ids if self._listens in (None, namespace)]

    def _sweep(self) -> None:
        now = self._now()
        with self._lock:
            objects = list(self._there.values())
        old = [stored for stored in objects if expired(stored, now)]
        keys = {stored.named.key for stored in old}
        kept = [stored for stored in objects if stored.named.key not in keys]
        self._delete(old, "expired")
        self._delete(victims(kept, self.settings.limits), "evicted")

    def _refresh_all(self) -> None:
        while not self._closing.is_set():
            try:
                self.refresh()
            except Exception:
                log.exception("object cache: a listing failed")
                self._told_fault("list_error")
            self._listed.set()
            self._closing.wait(self.settings.refresh_s)

    def _now(self) -> float:
        """Time by the store's clock."""
        return self._monotonic() + self._server_ahead if self._clock is not None else time.time()

    def _delete(self, objects: Sequence[Stored], cause: str) -> int:
        if objects:
            self._forget(objects, cause)
            self._delete_quietly(objects)
        return len(objects)

    def _delete_quietly(self, objects: Sequence[Stored]) -> None:
        try:
            self._client.delete([stored.named.key for stored in objects])
        except OSError as error:
            self._fault("delete_io", str(error))

    def _forget(self, objects: Sequence[Stored], cause: str) -> None:
        with self._lock:
            for stored in objects:
                id = (stored.named.namespace, stored.named.name)
                if self._there.get(id) == stored:
                    del self._there[id]
        self._count(f"removed_{cause}", len(objects))
        self._told_removed(self._heard((stored.named.namespace, stored.named.name) for stored in objects), cause)

    def _pause(self, cause: str, detail: str) -> None:
        """The store is slow or out of order: it is left alone for a while, and the service goes on."""
        with self._lock:
            first = self._monotonic() >= self._paused_until
            self._paused_until = self._monotonic() + PAUSE_S
        self._count(cause, 1)
        if first:
            log.warning("object cache %s: %s; not asked for %.0f s: %s", self._client.url, cause, PAUSE_S, detail)

    def _fault(self, cause: str, detail: str) -> None:
        self._count(cause, 1)
        log.warning("object cache %s: %s: %s", self._client.url, cause, detail)

    def _count(self, what: str, number: int) -> None:
        self.counts[what] += number
        if number and what.startswith(("read_", "write_", "list_", "delete_", "dropped_")):
            self._told_fault(what)
