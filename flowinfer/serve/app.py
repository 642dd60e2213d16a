"""The HTTP app: routes, request ids, and the one place where errors become responses. Plain ASGI, no middleware."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router

from flowinfer import __version__
from flowinfer.errors import RequestError
from flowinfer.message import Piece
from flowinfer.observe import exposition, metrics
from flowinfer.serve import openapi
from flowinfer.serve.access import KEYS_VARIABLE, Access, tenant_salt
from flowinfer.serve.anthropic.messages import Conversation, MessageRequest, message_job, render
from flowinfer.serve.asgi import Disconnected, Headers, Receive, Scope, Send, header, read_body, respond, respond_error
from flowinfer.serve.batches import Batches
from flowinfer.serve.endpoint import Answer
from flowinfer.serve.files import FileStore
from flowinfer.serve.files_api import FilesApi
from flowinfer.serve.mailbox import Mailbox
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.completions import CompletionRequest, completion_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.encode import encode
from flowinfer.serve.openai.fields import unsupported
from flowinfer.serve.openai.job import Job, Limits
from flowinfer.serve.openai.response_input import messages_of
from flowinfer.serve.openai.response_store import ResponseStore
from flowinfer.serve.openai.responses import ResponsesRequest, response_job
from flowinfer.serve.responses_api import ResponsesApi
from flowinfer.serve.routing import (
    Counted,
    Endpoint,
    method_error,
    path_label,
    raw_headers,
    request_id,
    unknown_path,
)
from flowinfer.serve.state import State
from flowinfer.serve.tokens import DetokenizeRequest, TokenizeRequest, Tokens, load_for
from flowinfer.serve.traffic import classed

if TYPE_CHECKING:
    from flowinfer.serve.gateway import Gateway

Sink = Callable[[Piece | RequestError], None]
READER_GRACE_S = 60.0  # for a client to read an answer that ended at the last moment; then it's dropped
PROBE_TIMEOUT_S = 5.0  # a worker loop that doesn't answer in this time admits nothing either
MESSAGES = "/v1/messages"
_OPEN_PATHS = {"/health", "/ready", "/version", "/metrics", "/openapi.json"}  # probes and scrapers have no key
_client: ContextVar[str] = ContextVar("client", default="")  # name of the key that the current request came with
_log = metrics.counter("http_responses_total")


class App:
    """The ASGI application over one gateway. sink_of gives what the gateway calls with news for a mailbox."""

    def __init__(self, gateway: Gateway, sink_of: Callable[[Mailbox], Sink]) -> None:
        self._gateway = gateway
        self._sink_of = sink_of
        config = gateway.config
        self._limits = Limits.of(config, gateway.defaults)
        limits = {"requests": config.key_requests, "per_minute": config.key_rate}
        self.access = Access.of(config.keys, os.environ.get(KEYS_VARIABLE, ""), **limits)
        self._tokens = Tokens(lambda: load_for(config.models, config.chat))
        self._started = int(time.time())
        self._state = State(config.state_path)
        self._batches: Batches | None = None
        self._router = Router(self._routes(), redirect_slashes=False, default=unknown_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        scope["request_id"] = request_id(scope)
        headers = [(b"x-request-id", scope["request_id"])]
        counted, is_anthropic = Counted(send), scope["path"].startswith(MESSAGES)
        if is_anthropic:
            headers.append((b"request-id", scope["request_id"]))  # the name that Anthropic's clients know
        client = ""
        try:
            client = self._enter(scope)
            await self._router(scope, receive, counted)
        except Disconnected:
            return
        except RequestError as error:
            await respond_error(counted, error, headers, anthropic=is_anthropic)
        except HTTPException as error:
            error_headers = [*headers, *raw_headers(error)]
            await respond_error(counted, method_error(scope, error), error_headers, anthropic=is_anthropic)
        except Exception as error:
            if not counted.started:
                message = f"The server broke: {type(error).__name__}."
                broken = RequestError(500, message, code="internal_error")
                await respond_error(counted, broken, headers, anthropic=is_anthropic)
            raise
        finally:
            self.access.leave(client)
            _log.labels(path=path_label(scope), status=counted.status).inc()

    def _enter(self, scope: Scope) -> str:
        """The client behind a request, counted in if it asks for work. Raises RequestError 401, 429."""
        if scope["path"] in _OPEN_PATHS or not self.access.guarded:
            return ""
        client = self.access.client(header(scope, b"authorization"), header(scope, b"x-api-key"))
        _client.set(client)  # each request runs in a task of its own
        if scope["method"] != "POST":
            return ""
        self.access.enter(client, time.monotonic())
        return client

    def resume(self) -> None:
        """Goes on with what a predecessor of the same state left; to be called in the HTTP loop."""
        if self._batches is not None:
            self._batches.resume()

    def close(self) -> None:
        """Lets go of the state; nothing may be asked any more."""
        self._state.close()

    @property
    def guarded(self) -> bool:
        """Whether requests need a key."""
        return self.access.guarded

    @property
    def routes(self) -> list[Route]:
        """What the service answers."""
        return [route for route in self._router.routes if isinstance(route, Route)]

    # ------------------------------------------------------------------------------------------------------ endpoints

    def _routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route("/health", Endpoint(self._health), methods=["GET"]),
            Route("/ready", Endpoint(self._ready), methods=["GET"]),
            Route("/version", Endpoint(self._version), methods=["GET"]),
            Route("/metrics", Endpoint(self._metrics), methods=["GET"]),
            Route("/openapi.json", Endpoint(self._openapi), methods=["GET"]),
            Route("/tokenize", Endpoint(self._tokenize), methods=["POST"]),
            Route("/detokenize", Endpoint(self._detokenize), methods=["POST"]),
        ]
        if "openai" in self._gateway.config.apis:
            config = self._gateway.config
            store = ResponseStore(self._state, config.state_responses)
            answered = (self._limits, config.max_body, self._answer, _json, _client.get)
            responses = ResponsesApi(*answered, store, config.keepalive)
            files = FileStore(self._state, config.state_files)
            self._batches = Batches(self._state, files, self._limits, self._answer, _client.set)
            routes += [
                Route("/v1/chat/completions", Endpoint(self._chat), methods=["POST"]),
                Route("/v1/completions", Endpoint(self._completions), methods=["POST"]),
                *FilesApi(files, self._batches, config.max_body, _json, _client.get).routes(Endpoint),
                Route("/v1/responses", Endpoint(responses.create), methods=["POST"]),
                Route("/v1/responses/input_tokens", Endpoint(self._count_input), methods=["POST"]),
                Route("/v1/responses/{id}", Endpoint(responses.retrieve), methods=["GET"]),
                Route("/v1/responses/{id}/input_items", Endpoint(responses.input_items), methods=["GET"]),
                Route("/v1/responses/{id}", Endpoint(responses.delete), methods=["DELETE"]),
                Route("/v1/responses/{id}/cancel", Endpoint(responses.cancel), methods=["POST"]),
            ]
        if "anthropic" in self._gateway.config.apis:
            routes += [
                Route(MESSAGES, Endpoint(self._messages), methods=["POST"]),
                Route(f"{MESSAGES}/count_tokens", Endpoint(self._count_tokens), methods=["POST"]),
            ]
        routes += [
            Route("/v1/models", Endpoint(self._models), methods=["GET"]),
            Route("/v1/models/{id:path}", Endpoint(self._model), methods=["GET"]),
        ]
        return routes

    async def _chat(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        body = await read_body(scope, receive, self._gateway.config.max_body)
        job = chat_job(decode(ChatRequest, body), f"chatcmpl-{uuid.uuid4().hex}", self._limits)
        await self._answer(classed(job, scope), receive, send, headers)

    async def _completions(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        body = await read_body(scope, receive, self._gateway.config.max_body)
        job = completion_job(decode(CompletionRequest, body), f"cmpl-{uuid.uuid4().hex}", self._limits)
        await self._answer(classed(job, scope), receive, send, headers)

    async def _messages(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        body = await read_body(scope, receive, self._gateway.config.max_body)
        job = message_job(decode(MessageRequest, body), f"msg_{uuid.uuid4().hex}", self._limits)
        await self._answer(classed(job, scope), receive, send, [*headers, (b"request-id", scope["request_id"])])

    async def _count_tokens(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        body = await read_body(scope, receive, self._gateway.config.max_body)
        chat = render(decode(Conversation, body), self._limits)
        count = await self._tokens.count(chat.messages, chat.tools, chat.template_args)
        await _json(send, {"input_tokens": count}, [*headers, (b"request-id", scope["request_id"])])

    async def _count_input(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        request = decode(ResponsesRequest, await read_body(scope, receive, self._gateway.config.max_body))
        if request.previous_response_id is not None:
            raise unsupported("previous_response_id")
        job = response_job(request, "", self._limits, messages_of(request.input), lambda response: None)
        (call,) = job.calls
        count = await self._tokens.count(call.messages or [], call.tools, call.template_args)
        await _json(send, {"object": "response.input_tokens", "input_tokens": count}, headers)

    def _answer(self, job: Job, receive: Receive, send: Send, headers: Headers) -> Awaitable[None]:
        config = self._gateway.config
        patience = config.request_timeout + READER_GRACE_S
        answer = Answer(self, job, buffer=config.reader_buffer, keepalive_s=config.keepalive, patience_s=patience)
        return answer.send(receive, send, headers)

    async def _models(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        data = [self._card(model) for model in self._limits.models]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        await _json(send, {"object": "list", "data": data, "has_more": False} | ends, headers)

    async def _model(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        id = scope["path_params"]["id"]
        if id not in self._limits.models:
            raise RequestError(404, f"The model {id!r} does not exist here.", code="model_not_found", param="model")
        await _json(send, self._card(id), headers)

    async def _health(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await _json(send, {"status": "ok"}, headers)

    async def _ready(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        refusal = await self._probe()
        if refusal is not None:
            raise RequestError(503, refusal.message, code="not_ready", retry_after_s=refusal.retry_after_s)
        await _json(send, {"status": "ready"}, headers)

    async def _version(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await _json(send, {"version": __version__}, headers)

    async def _openapi(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await _json(send, openapi.document(self._gateway.config.apis, keys=self.guarded), headers)

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        request = decode(TokenizeRequest, await read_body(scope, receive, self._gateway.config.max_body))
        await _json(send, await self._tokens.tokenize(request), headers)

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        request = decode(DetokenizeRequest, await read_body(scope, receive, self._gateway.config.max_body))
        await _json(send, await self._tokens.detokenize(request), headers)

    async def _metrics(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        model = self._limits.models[0] if self._gateway.config.vllm_metrics and self._limits.models else None
        await respond(
            send, 200, exposition.render(self._gateway.samples(), vllm_model=model), [exposition.CONTENT_TYPE, *headers]
        )

    # ----------------------------------------------------------------------------------------- the front of an answer

    def submit(self, job: Job, mailbox: Mailbox) -> None:
        for call in job.calls:
            call.cache_salt = tenant_salt(_client.get(), call.cache_salt)
        self._gateway.submit_group(job.calls, self._sink_of(mailbox))

    def cancel(self, job: Job) -> None:
        self._gateway.cancel_requests([call.id for call in job.calls])

    async def _probe(self) -> RequestError | None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RequestError | None] = loop.create_future()
        self._gateway.probe(lambda refusal: loop.call_soon_threadsafe(_resolve, answer, refusal))
        try:
            return await asyncio.wait_for(answer, PROBE_TIMEOUT_S)
        except TimeoutError:
            return RequestError(503, f"The front worker hasn't answered for {PROBE_TIMEOUT_S:g} s.")

    def _card(self, model: str) -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": self._started, "owned_by": "flowinfer"}
        since = datetime.fromtimestamp(self._started, UTC).isoformat()
        return card | {"type": "model", "display_name": model, "created_at": since}  # these are Anthropic's


async def _json(send: Send, value: Any, headers: Headers) -> None:
    await respond(send, 200, encode(value), [(b"content-type", b"application/json"), *headers])


def _resolve(answer: asyncio.Future[RequestError | None], refusal: RequestError | None) -> None:
    if not answer.done():
        answer.set_result(refusal)
