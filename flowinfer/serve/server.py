"""Runs the HTTP app in a thread with its own loop, and carries pieces from the worker's loop to it once a step."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from starlette.middleware.cors import CORSMiddleware

from flowinfer.errors import RequestError
from flowinfer.message import Piece
from flowinfer.serve.admin import Admin
from flowinfer.serve.app import App
from flowinfer.serve.mailbox import Mailbox
from flowinfer.serve.wire import Wire

if TYPE_CHECKING:
    from flowinfer.serve.gateway import Gateway

log = logging.getLogger(__name__)
Item = Piece | RequestError
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0  # for responses that are being written when the service stops
CLOSED_CHECK_S = 0.002  # between two looks, while it stops
GOODBYE_S = 0.1  # for connections with nothing left to write
KEEP_ALIVE_S = 75  # idle connections; longer than the 60 s after which common proxies give up first


class HttpServer:
    """One uvicorn server on a socket that was bound by someone else."""

    def __init__(self, gateway: Gateway, listener: socket.socket) -> None:
        self._listener = listener
        self._gateway = gateway
        self._loop = uvloop.new_event_loop()
        self._outbox: list[tuple[Mailbox, Item]] = []
        self._started = threading.Event()
        self._error: Exception | None = None
        app = App(gateway, self.sink)
        self._guarded = app.guarded
        self._app = app
        self._server = _Uvicorn(_config(app, gateway), self._on_started)
        self._thread = threading.Thread(target=self._run, name="flowinfer-http", daemon=True)

    def start(self) -> None:
        """Returns once connections are accepted. Raises what kept the server from it, or TimeoutError."""
        self._gateway.after_step = self.flush
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError(f"The HTTP server didn't start within {START_TIMEOUT_S:g} s.")
        if self._error is not None:
            raise self._error
        host = self._listener.getsockname()[0]
        if not (self._guarded or ipaddress.ip_address(host).is_loopback):
            log.warning("anyone who reaches %s may use this service: set serve.keys, or listen on 127.0.0.1", host)

    def stop(self) -> None:
        """Lets responses finish for a few seconds, then closes."""
        self._gateway.after_step = lambda: None
        self._server.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended by itself
            self._loop.call_soon_threadsafe(self._server.exits.set)
        self._thread.join(STOP_TIMEOUT_S + 1.0)

    def sink(self, mailbox: Mailbox) -> Callable[[Item], None]:
        """What the gateway calls, in the worker's loop, with news for this mailbox."""
        return lambda item: self._outbox.append((mailbox, item))

    def flush(self) -> None:
        """Hands over all news of a step, waking the HTTP loop once."""
        if self._outbox:
            batch, self._outbox = self._outbox, []
            try:
                self._loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:
                return  # the loop is closed: nobody is connected any more

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        except Exception as error:
            self._error = error
            log.exception("the HTTP server broke")
        finally:
            self._started.set()
            self._loop.run_until_complete(_end_tasks())
            self._loop.close()
            self._app.close()

    def _on_started(self) -> None:
        self._app.resume()
        self._started.set()


async def _end_tasks() -> None:
    """Ends what runs in the background: batches, responses. What is durable of them, the next service goes on with."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    """uvicorn, telling when it accepts connections. Its own looks ten times a second whether it shall end.

    exits: set in its loop, with should_exit.
    """

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self.exits = asyncio.Event()

    def startup(self, sockets: list[socket.socket] | None = None) -> Coroutine[Any, Any, None]:
        return self._startup(sockets)

    async def _startup(self, sockets: list[socket.socket] | None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def main_loop(self) -> None:
        """Renews the date of the headers each second, until the end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exits.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts nothing more, and closes connections as their responses end."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        state = self.server_state
        await self._while(lambda: state.tasks or any(map(_writes, state.connections)), STOP_TIMEOUT_S)
        for task in state.tasks:
            task.cancel()
        await self._while(lambda: state.connections, GOODBYE_S)
        for connection in list(state.connections):  # an idle client may not answer TLS's goodbye
            connection.transport.abort()
        for server in self.servers:
            await server.wait_closed()

    async def _while(self, busy: Callable[[], object], limit_s: float) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + limit_s
        while busy() and now() < deadline:
            await asyncio.sleep(CLOSED_CHECK_S)


def _writes(connection: Any) -> bool:
    """Whether something of a response still waits for the client to read."""
    return bool(connection.transport.get_write_buffer_size())


def _config(app: App, gateway: Gateway) -> uvicorn.Config:
    settings = gateway.config
    return uvicorn.Config(
        Admin(_with_cors(app, settings.cors) if settings.cors else app, gateway, app.access),
        interface="asgi3",
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
        http=Wire,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a wrapper around every request, for an address that nobody reads
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def _with_cors(app: App, origins: tuple[str, ...]) -> CORSMiddleware:
    """Lets pages of these origins ask; outside of the app, since a browser's preflight has no key."""
    exposed = ["x-request-id", "retry-after"]
    allowed = [origin.rstrip("/") for origin in origins]
    return CORSMiddleware(app, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)


def _deliver(batch: list[tuple[Mailbox, Item]]) -> None:
    for mailbox, item in batch:
        mailbox.put(item)
