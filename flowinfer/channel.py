"""The mailbox of a process: two ZeroMQ lanes, control ahead of data, and the one call that waits. Knows no stages.

Every mailbox binds a PULL socket for data and one for control; peers connect PUSH sockets to both. High-water marks are
off: credit, counted by the worker, is the only flow control. This is the only file that imports zmq.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from flowinfer.codec import Buffer, Codec, CodecError, Header, has_parts
from flowinfer.errors import TransportError
from flowinfer.message import Event, Message

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

IPC_LIMIT = 107  # bytes of a Unix socket's path
MAX_FRAME_BYTES = 1 << 30
MAX_PARTS = 4_096
MAX_EVENTS_A_POLL = 100_000  # all of them, unless a peer has gone mad
MAX_MESSAGES_A_POLL = 128  # then stages get their turn, and their producers credit
_MORE_BYTES = 65_536  # parts above are sent without a copy

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # plain numbers: the enums cost 1 us a time

Received = tuple[Header, list[Message]]


class Endpoints(NamedTuple):
    """Where a mailbox listens."""

    data: str
    control: str


@dataclass(frozen=True)
class Keys:
    """The CURVE key pair of a service, which all its workers share: who doesn't have it isn't heard. Z85 text."""

    public: str
    secret: str

    def get_public(self) -> bytes:
        return self.public.encode()


@dataclass
class _Peer:
    generation: int
    endpoints: Endpoints
    control: zmq.Socket[bytes]
    data: zmq.Socket[bytes] | None = None  # opened by the first message: most pairs only exchange events


class _OneKey:
    """Tells the authenticator that only holders of the service's own key may connect."""

    def __init__(self, keys: Keys) -> None:
        self._public = keys.get_public()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Channel:
    """One mailbox and its connections. Not thread-safe, except for `wake`."""

    def __init__(self, name: str, generation: int = 1, *, epoch: int = 1, keys: Keys | None = None) -> None:
        self.name, self.generation, self.epoch, self.keys = name, generation, epoch, keys
        self.codec = Codec()
        self.num_malformed = 0
        self.bytes_sent = 0
        self._peers: dict[str, _Peer] = {}
        self._event_headers: dict[str, Header] = {}
        self._heads: dict[tuple[type[Message], str, str, int], bytes] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = self._start_authenticator()
        self._control = self._socket(zmq.PULL)
        self._data = self._socket(zmq.PULL)
        self.endpoints = Endpoints("", "")  # where it listens
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll_list: list[tuple[Any, int]] = [(s, zmq.POLLIN) for s in (self._control, self._data, self._wake_read)]

    # -- opening and closing -------------------------------------------------------------------------------------------

    def bind_ipc(self, folder: Path) -> Endpoints:
        """Listens in `folder`, which only this user may enter. Raises TransportError when its path is too long."""
        return self._bind(*(f"ipc://{folder / f'{self.name}.{self.generation}.{lane}'}" for lane in ("d", "c")))

    def bind_tcp(self, host: str = "127.0.0.1") -> Endpoints:
        """Listens on free ports of `host`. Raises TransportError off loopback without keys."""
        if self.keys is None and not (host.startswith("127.") or host in ("localhost", "::1")):
            raise TransportError(f"{host} is open to the network.", help="Set network.curve keys, or bind 127.0.0.1.")
        return self._bind(f"tcp://{host}:*", f"tcp://{host}:*")

    def bind_at(self, endpoints: Endpoints) -> Endpoints:
        """Listens where another mailbox did, whose process has died: its peers find this one there."""
        return self._bind(endpoints.data, endpoints.control)

    def connect(self, peer: str, generation: int, endpoints: Endpoints) -> None:
        """Opens the way to a peer; an older generation of it is dropped."""
        self.disconnect(peer)
        self._peers[peer] = _Peer(generation, endpoints, self._connect(endpoints.control))

    def raise_epoch(self, epoch: int) -> None:
        """Frames say this epoch from now on."""
        self.epoch = epoch
        self._heads.clear()
        self._event_headers.clear()

    def disconnect(self, peer: str) -> None:
        """Forgets a peer and what is still on its way to it. Unknown peers are normal."""
        found = self._peers.pop(peer, None)
        if found is not None:
            found.control.close(0)
            if found.data is not None:
                found.data.close(0)

    def close(self, linger_ms: int = 0) -> None:
        """Closes everything; events sent last get linger_ms to leave."""
        for peer in self._peers.values():
            peer.control.close(linger_ms)
            if peer.data is not None:
                peer.data.close(0)
        self._peers.clear()
        self._control.close(0)
        self._data.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- sending -------------------------------------------------------------------------------------------------------

    @property
    def peers(self) -> Sequence[str]:
        return tuple(self._peers)

    def send(self, peer: str, edge: str, lane: str, messages: Sequence[Message], cost: int = 1) -> int:
        """Sends messages of one type over an edge; returns bytes sent, 0 when the peer isn't there. Never blocks."""
        found = self._peers.get(peer)
        if found is None:
            return 0
        if found.data is None:
            found.data = self._connect(found.endpoints.data)
        key = (type(messages[0]), edge, lane, cost)
        head = self._heads.get(key)
        if head is None:
            head = self.codec.head(Header(key[0].__name__, self.name, self.generation, self.epoch, edge, lane, cost))
            if cost == 1:  # others are as many as there are sizes of requests
                self._heads[key] = head
        return self._send(found.data, self.codec.encode_behind(head, messages))

    def send_event(self, peer: str, event: Event) -> bool:
        """Sends an event ahead of data (with it, where its type is bulk); False when the peer isn't there."""
        found = self._peers.get(peer)
        if found is None:
            return False
        if event.bulk and found.data is None:
            found.data = self._connect(found.endpoints.data)
        socket = found.data if event.bulk and found.data is not None else found.control
        kind = type(event).__name__
        header = self._event_headers.get(kind)
        if header is None:
            header = self._event_headers[kind] = Header(kind, self.name, self.generation, self.epoch)
        return self._send(socket, self.codec.encode(header, (event,))) > 0

    def _send(self, socket: zmq.Socket[bytes], frames: list[Buffer]) -> int:
        try:
            if len(frames) == 1:
                size = len(frames[0])
                socket.send(frames[0], zmq.NOBLOCK)
            else:
                size = sum(map(len, frames))
                socket.send_multipart(frames, zmq.NOBLOCK, copy=size < _MORE_BYTES)
        except zmq.ZMQError as error:
            raise TransportError(f"can't send: {error}") from error
        self.bytes_sent += size
        return size

    # -- waiting and receiving -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Ends a `poll` that waits. For any thread and for signal handlers."""
        try:
            os.write(self._wake_write, b"\0")
        except (BlockingIOError, OSError):
            return  # full: it's awake already; closed: nobody waits

    @property
    def wake_fd(self) -> int:
        """A byte written here ends a `poll`; for signal.set_wakeup_fd."""
        return self._wake_write

    def poll(self, timeout_s: float | None) -> tuple[list[Received], list[Received]]:
        """Waits once, for control, data or `wake`, at most timeout_s (None: no limit). Returns events, then data."""
        timeout = -1 if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))
        ready = zmq.zmq_poll(self._poll_list, timeout)
        events: list[Received] = []
        data: list[Received] = []
        for socket, _ in ready:
            if socket is self._control:
                self._receive(self._control, events, MAX_EVENTS_A_POLL)
            elif socket is self._data:
                self._receive(self._data, data, MAX_MESSAGES_A_POLL)
            else:
                self._drain_wake()
        return events, data

    def _receive(self, socket: zmq.Socket[bytes], into: list[Received], limit: int) -> None:
        count = 0
        while True:
            first = socket.recv(zmq.NOBLOCK)
            frames = [first, *self._rest(socket)] if has_parts(first) else (first,)
            try:
                into.append(self.codec.decode(frames))
            except CodecError:
                self.num_malformed += 1
                self._rest(socket)
            count += len(into[-1][1]) if into else 1
            if count >= limit or not int(socket.getsockopt(_EVENTS)) & _POLLIN:
                return

    def _rest(self, socket: zmq.Socket[bytes]) -> list[Buffer]:
        parts: list[Buffer] = []
        while socket.getsockopt(zmq.RCVMORE):
            part = socket.recv(zmq.NOBLOCK, copy=False)
            if len(parts) < MAX_PARTS:
                parts.append(part.buffer)
        return parts

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_read, 65_536)
        except BlockingIOError:
            return

    # -- sockets -------------------------------------------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = MAX_FRAME_BYTES
        return socket

    def _bind(self, data: str, control: str) -> Endpoints:
        self.endpoints = Endpoints(self._bind_one(self._data, data), self._bind_one(self._control, control))
        return self.endpoints

    def _bind_one(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        path = endpoint.removeprefix("ipc://")
        if path != endpoint and len(os.fsencode(path)) > IPC_LIMIT:
            raise TransportError(
                f"the socket path {path} is longer than {IPC_LIMIT} bytes.", help="Set a shorter TMPDIR."
            )
        if self.keys is not None:
            socket.curve_server = True
            socket.curve_secretkey = self.keys.secret.encode()
            socket.curve_publickey = self.keys.get_public()
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise TransportError(f"can't listen on {endpoint}: {error}.") from error
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.PUSH)
        if self.keys is not None:
            socket.curve_serverkey = socket.curve_publickey = self.keys.get_public()
            socket.curve_secretkey = self.keys.secret.encode()
        socket.connect(endpoint)
        return socket

    def _start_authenticator(self) -> ThreadAuthenticator | None:
        if self.keys is None:
            return None
        from zmq.auth.thread import ThreadAuthenticator  # it brings asyncio, 25 ms of each worker's start

        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=_OneKey(self.keys))
        return authenticator


class Publisher:
    """Numbered batches for whoever subscribes (PUB), and past ones once more for who asks (ROUTER), on loopback.

    A batch is three frames: topic, number (8 bytes, big end first), payload. A replay is asked for by the number to
    begin with and ends with number -1, as vLLM's readers of block events expect. Stages of one process may share one:
    the first `open` binds, the last `close` lets go. Not thread-safe.
    """

    END = (-1).to_bytes(8, "big", signed=True)

    def __init__(self, port: int, replay_port: int, *, keep: int = 10_000) -> None:
        self.port, self.replay_port = port, replay_port
        self._past: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._next = 0
        self._users = 0
        self._sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None

    def open(self) -> None:
        """Listens. Raises TransportError where a port is taken; port 0 takes a free one."""
        if self._sockets is None:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
            pub, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
            pub.sndhwm, replay.sndhwm = 100_000, (self._past.maxlen or 0) + 1
            pub.linger = replay.linger = 0
            try:
                self.port = _bind_port(pub, self.port)
                self.replay_port = _bind_port(replay, self.replay_port)
            except TransportError:
                pub.close(0)
                replay.close(0)
                raise
            self._sockets = pub, replay
        self._users += 1

    def close(self) -> None:
        """Lets go of the ports when nobody else uses them."""
        self._users -= 1
        if self._sockets is not None and self._users <= 0:
            for socket in self._sockets:
                socket.close(0)
            self._sockets = None

    def publish(self, topic: str, payload: bytes) -> None:
        """Sends a batch to those that listen now; who is too slow misses it, and asks for it."""
        if self._sockets is not None:
            self._past.append((self._next, payload))
            self._sockets[0].send_multipart((topic.encode(), self._next.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._next += 1

    def answer(self) -> None:
        """Repeats past batches for those that asked. Never waits."""
        while self._sockets is not None and self._sockets[1].poll(0):
            replay = self._sockets[1]
            reader, *_, first = replay.recv_multipart(zmq.NOBLOCK)
            for number, payload in self._past:
                if number >= int.from_bytes(first, "big"):
                    replay.send_multipart((reader, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            replay.send_multipart((reader, b"", self.END, b""), zmq.NOBLOCK)


def _bind_port(socket: zmq.Socket[bytes], port: int) -> int:
    try:
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    except zmq.ZMQError as error:
        raise TransportError(f"can't listen on port {port}: {error}.") from error
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
