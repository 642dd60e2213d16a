"""Every request ends once: an answer, an error, or a cancel that reaches the workers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest

from flowinfer.message import Cancel, Drain, Ended, Failure, Finish, Moved, Piece, WorkerDown, WorkerUp
from flowinfer.serve import app, asgi

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


def raw_request(service: Any, **more: Any) -> socket.socket:
    """Sends a request by hand, so that the test owns the connection."""
    body = json.dumps(ASK | more).encode()
    connection = socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=10)
    connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(65536)
        assert part, f"closed before {mark!r}: {data!r}"
        data += part
    return data


class Background:
    """A request that runs while the test plays the pipeline."""

    def __init__(self, service: Any, **more: Any) -> None:
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(service, more), daemon=True)
        self._thread.start()

    def result(self) -> httpx.Response:
        self._thread.join(10)
        assert self.response is not None, "no response"
        return self.response

    def _ask(self, service: Any, more: dict[str, Any]) -> None:
        self.response = httpx.post(service.url + CHAT, json=ASK | more, timeout=10)


# ------------------------------------------------------------------------------------------------------- the good end


def test_the_end_is_told_to_the_workers(service: Any) -> None:
    asked = Background(service)
    call = service.next_call()
    service.say(call.id, "hi", finish="stop")
    assert asked.result().status_code == 200
    service.wait_sent(Ended, call.id)
    assert not service.was_sent(Cancel, call.id)


def test_a_stop_string_in_the_text_cancels_what_the_model_still_does(service: Any) -> None:
    asked = Background(service, stop="##")
    call = service.next_call()
    service.put(Piece(id=call.id, text="hi", finish=Finish(reason="stop", completion_tokens=3, stop="##")))
    assert asked.result().json()["choices"][0]["finish_reason"] == "stop"
    service.wait_sent(Cancel, call.id)


def test_what_comes_after_the_end_is_ignored(service: Any) -> None:
    asked = Background(service)
    call = service.next_call()
    service.say(call.id, "hi", finish="stop")
    service.say(call.id, "again", finish="stop")
    service.settle()
    service.put(Failure(id=call.id, message="too late"))
    assert asked.result().json()["choices"][0]["message"]["content"] == "hi"
    service.settle()
    assert service.gateway.num_open == 0


# ------------------------------------------------------------------------------------------------------- disconnects


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_cancels(service: Any, stream: bool) -> None:
    connection = raw_request(service, stream=stream)
    call = service.next_call()
    connection.close()
    service.wait_sent(Cancel, call.id)
    assert service.gateway.num_open == 0


def test_leaving_in_mid_stream_cancels(service: Any) -> None:
    connection = raw_request(service, stream=True)
    call = service.next_call()
    service.say(call.id, "first")
    read_until(connection, b"first")
    connection.close()
    service.wait_sent(Cancel, call.id)


def test_leaving_in_mid_answer_cancels_all_choices(service: Any) -> None:
    connection = raw_request(service, n=2)
    first, second = service.next_call(), service.next_call()
    service.say(first.id, "half")
    connection.close()
    service.wait_sent(Cancel, first.id)
    service.wait_sent(Cancel, second.id)


class HalfClosingProxy:
    """Passes bytes on, both ways. When its client goes away it only stops sending on; it keeps reading the service."""

    def __init__(self, service: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._upstream = socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=10)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        threading.Thread(target=self._read, args=(client,), daemon=True).start()
        while data := client.recv(65536):
            self._upstream.sendall(data)
        self._upstream.shutdown(socket.SHUT_WR)

    def _read(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := self._upstream.recv(65536):
                client.sendall(data)

    def close(self) -> None:
        self._listener.close()
        self._upstream.close()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_behind_a_proxy_that_closes_by_half_cancels(service: Any, stream: bool, begun: bool) -> None:
    proxy = HalfClosingProxy(service)
    body = json.dumps(ASK | {"stream": stream}).encode()
    connection = socket.create_connection(proxy.address, timeout=10)
    connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
    call = service.next_call()
    if begun:
        service.say(call.id, "first")
    if begun and stream:
        read_until(connection, b"first")
    connection.close()
    service.wait_sent(Cancel, call.id)
    proxy.close()


def test_leaving_with_half_a_body_opens_nothing(service: Any) -> None:
    connection = socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=10)
    connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{" % CHAT.encode())
    connection.close()
    assert httpx.get(service.url + "/health").status_code == 200
    assert service.calls.empty()


# --------------------------------------------------------------------------------------------------------- deadlines


def test_a_deadline_answers_504_and_cancels(service: Any) -> None:
    asked = Background(service)
    call = service.next_call()
    service.say(call.id, "half an ")
    service.advance(601)
    response = asked.result()
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert service.was_sent(Cancel, call.id)


def test_each_request_has_its_own_deadline(service: Any) -> None:
    first = Background(service)
    early = service.next_call()
    service.advance(400)
    second = Background(service)
    late = service.next_call()
    service.advance(300)
    assert first.result().status_code == 504
    service.say(late.id, "in time", finish="stop")
    assert second.result().status_code == 200
    assert not service.was_sent(Cancel, late.id)
    assert service.was_sent(Cancel, early.id)


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failure_is_an_error_of_its_status(service: Any) -> None:
    asked = Background(service)
    call = service.next_call()
    service.put(Failure(id=call.id, status=400, message="too long", code="context_length_exceeded", param="messages"))
    response = asked.result()
    assert response.status_code == 400
    error = {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert response.json() == {"error": error}
    service.wait_sent(Cancel, call.id)


def test_an_early_failure_of_a_stream_has_its_status(service: Any) -> None:
    asked = Background(service, stream=True)
    service.put(Failure(id=service.next_call().id, status=429, message="full", retry_after_s=2.5))
    response = asked.result()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"


def test_a_failure_in_mid_stream_ends_it_with_an_error_event(service: Any) -> None:
    connection = raw_request(service, stream=True)
    call = service.next_call()
    service.say(call.id, "half")
    read_until(connection, b"half")
    service.put(Failure(id=call.id, status=500, message="the stage broke"))
    rest = read_until(connection, b"0\r\n\r\n")
    assert b'data: {"error":{"message":"the stage broke"' in rest
    assert b"[DONE]" not in rest


def test_a_completion_that_breaks_in_mid_stream_says_so_too(service: Any) -> None:
    player = threading.Thread(target=_say_half_and_fail, args=(service,))
    player.start()
    ask = {"model": "tiny", "prompt": "x", "stream": True}
    events = httpx.post(f"{service.url}/v1/completions", json=ask, timeout=10).text.strip().split("\n\n")
    assert "half" in events[0]
    assert "the stage broke" in events[-1]
    player.join()


def test_the_official_client_raises_on_a_failure_in_mid_stream(start: Any) -> None:
    service = start()
    with pytest.raises(openai.APIError, match="the stage broke"):
        _break_off_mid_stream(service)


def _break_off_mid_stream(service: Any) -> None:
    player = threading.Thread(target=_say_half_and_fail, args=(service,))
    player.start()
    stream = service.client().chat.completions.create(**ASK, stream=True)
    try:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "never"
    finally:
        player.join()


def _say_half_and_fail(service: Any) -> None:
    call = service.next_call()
    service.say(call.id, "half")
    service.settle()
    service.put(Failure(id=call.id, status=500, message="the stage broke"))


def test_text_before_a_failure_is_still_sent(service: Any) -> None:
    asked = Background(service, stream=True)
    call = service.next_call()
    service.say(call.id, "kept")
    service.settle()
    service.put(Failure(id=call.id, status=500, message="broke"))
    text = asked.result().text
    assert text.index("kept") < text.index("broke")


def test_an_aborted_answer_is_no_answer(service: Any) -> None:
    asked = Background(service)
    service.say(service.next_call().id, finish="abort")
    assert asked.result().status_code == 500


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_a_token_is_no_answer(service: Any, stream: bool, reason: str) -> None:
    asked = Background(service, stream=stream)
    call = service.next_call()
    service.say(call.id, finish=reason)
    assert asked.result().status_code == 500
    assert asked.result().json()["error"]["code"] == "no_answer"
    service.wait_sent(Cancel, call.id)


def test_an_answer_that_stops_at_once_is_one(service: Any) -> None:
    asked = Background(service)
    service.say(service.next_call().id, finish="stop", usage={"completion_tokens": 1})
    assert (asked.result().status_code, asked.result().json()["choices"][0]["message"]["content"]) == (200, "")


def test_one_failed_choice_fails_all(service: Any) -> None:
    asked = Background(service, n=2)
    first, second = service.next_call(), service.next_call()
    service.say(first.id, "whole", finish="stop")
    service.put(Failure(id=second.id, status=500, message="broke"))
    assert asked.result().status_code == 500
    service.wait_sent(Cancel, second.id)


# ------------------------------------------------------------------------------------------------------ worker death


def test_the_death_of_the_holder_fails_its_requests_only(service: Any) -> None:
    held = Background(service)
    one = service.next_call()
    free = Background(service)
    other = service.next_call()
    service.put(Moved(ids=[one.id], worker="decode.0", generation=3))
    service.put(Moved(ids=[other.id], worker="decode.1", generation=1))
    service.put(WorkerDown(worker="decode.0", generation=3))
    response = held.result()
    assert response.status_code == 503
    assert "decode.0" in response.json()["error"]["message"]
    service.say(other.id, "fine", finish="stop")
    assert free.result().status_code == 200


def test_a_request_that_moved_on_survives(service: Any) -> None:
    asked = Background(service)
    call = service.next_call()
    service.put(Moved(ids=[call.id], worker="prefill.0", generation=1))
    service.put(Moved(ids=[call.id], worker="decode.0", generation=1))
    service.put(WorkerDown(worker="prefill.0", generation=1))
    service.say(call.id, "fine", finish="stop")
    assert asked.result().status_code == 200


def test_what_a_worker_says_late_of_its_part_is_not_believed(service: Any) -> None:
    """What several workers send comes in any order."""
    asked = Background(service)
    call = service.next_call()
    service.put(Moved(ids=[call.id], worker="decode.0", generation=1, hops=[2]))
    service.put(Moved(ids=[call.id], worker="prefill.0", generation=1, hops=[1]))
    service.put(Moved(ids=[call.id], worker="decode.2", generation=1, hops=[4]))
    service.put(Moved(ids=[call.id], worker="decode.1", generation=1, hops=[3]))
    for gone in ("decode.0", "decode.1", "prefill.0"):
        service.put(WorkerDown(worker=gone, generation=1))
    service.put(WorkerDown(worker="decode.2", generation=1))
    assert "decode.2" in asked.result().json()["error"]["message"]


def test_a_worker_that_takes_over_what_has_ended_is_told(service: Any) -> None:
    """It may have begun after everybody else was."""
    asked = Background(service)
    call = service.next_call()
    service.say(call.id, "fine", finish="stop")
    asked.result()
    service.put(Moved(ids=[call.id], worker="decode.1", generation=1, shared=True))
    service.wait_sent(Cancel, call.id)


def test_the_death_of_an_older_generation_harms_nobody(service: Any) -> None:
    asked = Background(service)
    call = service.next_call()
    service.put(Moved(ids=[call.id], worker="decode.0", generation=2))
    service.put(WorkerDown(worker="decode.0", generation=1))
    service.say(call.id, "fine", finish="stop")
    assert asked.result().status_code == 200


def test_death_in_mid_stream_ends_it_with_an_error_event(service: Any) -> None:
    connection = raw_request(service, stream=True)
    call = service.next_call()
    service.put(Moved(ids=[call.id], worker="decode.0", generation=1))
    service.say(call.id, "half")
    read_until(connection, b"half")
    service.put(WorkerDown(worker="decode.0", generation=1))
    rest = read_until(connection, b"0\r\n\r\n")
    assert b"decode.0" in rest
    assert b"[DONE]" not in rest


# --------------------------------------------------------------------------------------------------------- admission


def test_a_full_house_answers_429_with_retry_after(start: Any) -> None:
    service = start(max_requests=1)
    asked = Background(service)
    call = service.next_call()
    refused = httpx.post(service.url + CHAT, json=ASK)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    service.say(call.id, "hi", finish="stop")
    assert asked.result().status_code == 200


def test_a_full_pipeline_answers_429_and_is_not_ready(service: Any) -> None:
    service.ctx.is_full = True
    assert httpx.post(service.url + CHAT, json=ASK).status_code == 429
    assert httpx.get(service.url + "/ready").status_code == 503
    service.ctx.is_full = False
    assert httpx.get(service.url + "/ready").status_code == 200


def test_a_draining_service_finishes_what_is_open(service: Any) -> None:
    asked = Background(service)
    call = service.next_call()
    service.put(Drain())
    service.settle()
    refused = httpx.post(service.url + CHAT, json=ASK)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert httpx.get(service.url + "/ready").status_code == 503
    assert httpx.get(service.url + "/health").status_code == 200
    service.say(call.id, "hi", finish="stop")
    assert asked.result().status_code == 200


def test_a_missing_worker_refuses_until_it_is_back(service: Any) -> None:
    service.put(WorkerDown(worker="prefill.0", generation=1))
    service.settle()
    response = httpx.post(service.url + CHAT, json=ASK)
    assert response.status_code == 503
    assert "prefill" in response.json()["error"]["message"]
    service.put(WorkerUp(worker="prefill.0", generation=2, data="", control=""))
    service.settle()
    assert httpx.get(service.url + "/ready").status_code == 200


def test_stopping_fails_what_is_open(service: Any) -> None:
    asked = Background(service)
    service.next_call()
    service.close()
    assert asked.result().status_code == 503


# ------------------------------------------------------------------------------------------------------ slow readers


def test_a_slow_reader_stops_only_itself_and_loses_nothing(service: Any) -> None:
    slow = raw_request(service, stream=True)
    call = service.next_call()
    words = [f"<{i}>" + "x" * 200 for i in range(20_000)]
    for word in words:
        service.say(call.id, word)
    service.settle()
    quick = Background(service)
    service.say(service.next_call().id, "quick", finish="stop")
    assert quick.result().status_code == 200
    service.say(call.id, finish="stop")
    text = read_until(slow, b"[DONE]").decode()
    deltas = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {") and line.endswith("}")]
    contents = [d["choices"][0]["delta"].get("content", "") for d in deltas]
    assert "".join(contents) == "".join(words)
    assert len(contents) < len(words)  # pieces were joined while the reader slept


def test_a_client_that_never_reads_is_dropped(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READER_GRACE_S", 0.05)
    service = start(request_timeout="50ms")  # of real time for the reader; the pipeline's clock stands still
    connection = raw_request(service, stream=True)
    call = service.next_call()
    service.say(call.id, "first")
    for _ in range(2_000):
        service.say(call.id, "x" * 10_000)
    service.wait_sent(Cancel, call.id)
    connection.close()


def test_a_body_that_does_not_arrive_is_408(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODY_TIMEOUT_S", 0.05)
    connection = socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=10)
    connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{" % CHAT.encode())
    assert b" 408 " in read_until(connection, b"request_timeout")
    connection.close()


def test_a_waiting_stream_shows_signs_of_life(start: Any) -> None:
    service = start(keepalive="20ms")
    connection = raw_request(service, stream=True)
    call = service.next_call()
    read_until(connection, b": keep-alive")
    service.say(call.id, "at last", finish="stop")
    assert b"at last" in read_until(connection, b"[DONE]")


def test_the_official_client_sees_errors_as_its_own(service: Any) -> None:
    service.ctx.is_full = True
    with pytest.raises(openai.RateLimitError, match="full"):
        service.client().chat.completions.create(**ASK)
