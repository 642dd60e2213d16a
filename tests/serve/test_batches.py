"""Files and batches, by the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from flowinfer.message import Call, Finish, Piece
from flowinfer.serve.access import digest_of

CHAT = "/v1/chat/completions"


def echo(call: Call) -> Iterator[Piece]:
    text = call.messages[-1]["content"] if call.messages else str(call.prompt)
    yield Piece(id=call.id, text=text, tokens=[1], finish=Finish(reason="stop", completion_tokens=1))


def line(id: str, text: str, url: str = CHAT, **fields: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def upload(client: openai.OpenAI, *lines: bytes) -> str:
    return client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch").id


def ended(client: openai.OpenAI, id: str) -> Any:
    deadline = time.monotonic() + 20
    while (batch := client.batches.retrieve(id)).status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return batch


def rows(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    found = [json.loads(row) for row in client.files.content(file).text.splitlines()]
    return {row["custom_id"]: row for row in found}


def test_a_batch_answers_each_line_once(start: Any) -> None:
    client = start(echo, max_requests=4).client()
    lines = [line(f"r{n}", f"text {n}") for n in range(12)]
    bad = [line("bad", "x", temperature=9), line("elsewhere", "x", url="/v1/completions"), b"{nonsense\n", b"\n"]
    batch = client.batches.create(
        input_file_id=upload(client, *lines, *bad), endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
    )
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 15, "completed": 12, "failed": 3}
    answers = rows(client, batch.output_file_id)
    assert {id: row["response"]["body"]["choices"][0]["message"]["content"] for id, row in answers.items()} == {
        f"r{n}": f"text {n}" for n in range(12)
    }
    errors = rows(client, batch.error_file_id)
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["elsewhere"]["response"]["status_code"] == 400
    assert errors[None]["line"] == 15  # type: ignore[index]
    assert [found.id for found in client.batches.list()] == [batch.id]


def test_a_batch_waits_where_the_service_is_full(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.serve.batches.RETRY_S", 0.01)
    service = start(max_requests=1)
    client = service.client()
    made = client.batches.create(
        input_file_id=upload(client, line("a", "1"), line("b", "2")), endpoint=CHAT, completion_window="24h"
    )
    for _ in range(2):
        service.say(service.calls.get(timeout=10).id, "x", finish="stop")
    assert ended(client, made.id).request_counts.completed == 2


def test_a_cancel_stops_the_work_and_keeps_what_is_done(start: Any) -> None:
    service = start()
    client = service.client()
    made = client.batches.create(
        input_file_id=upload(client, line("a", "1"), line("b", "2")), endpoint=CHAT, completion_window="24h"
    )
    first, second = service.calls.get(timeout=10), service.calls.get(timeout=10)
    service.say(first.id, "done", finish="stop")
    while client.batches.retrieve(made.id).request_counts.completed < 1:
        time.sleep(0.01)
    assert client.batches.cancel(made.id).status == "cancelling"
    batch = ended(client, made.id)
    assert (batch.status, list(rows(client, batch.output_file_id))) == ("cancelled", ["a"])
    with service.ctx.news:
        assert service.ctx.news.wait_for(lambda: any(second.id in getattr(e, "ids", ()) for e in service.ctx.sent), 10)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(made.id)


def test_files_are_listed_fetched_and_deleted(start: Any) -> None:
    client = start(echo).client()
    ids = [upload(client, line("a", str(n))) for n in range(3)]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # by pages
    assert client.files.retrieve(ids[0]).filename == "in.jsonl"
    assert client.files.content(ids[0]).content == line("a", "0")
    assert client.files.delete(ids[0]).deleted
    for attempt in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(ids[0])


def test_no_tenant_sees_anothers_files_or_batches(start: Any) -> None:
    service = start(echo, keys={"ann": digest_of("a"), "bob": digest_of("b")})
    ann, bob = (openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0) for key in "ab")
    file = upload(ann, line("a", "1"))
    batch = ann.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    for attempt in (
        lambda: bob.files.retrieve(file),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert not list(bob.files.list())
    assert not list(bob.batches.list())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(start: Any, fields: dict[str, Any], param: str) -> None:
    service = start(echo)
    body = {"input_file_id": upload(service.client(), b""), "endpoint": CHAT, "completion_window": "24h"} | fields
    response = httpx.post(f"{service.url}/v1/batches", json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"--x\r\n", b"{}"])
@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "multipart/form-data", "application/json"])
def test_a_wrong_upload_is_400(service: Any, body: bytes, kind: str) -> None:
    response = httpx.post(f"{service.url}/v1/files", content=body, headers={"content-type": kind})
    assert response.status_code == 400
