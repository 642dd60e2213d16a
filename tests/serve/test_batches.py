"""Files and batches, by the official client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from flowinfer.errors import RequestError
from flowinfer.message import Call, Finish, Piece
from flowinfer.serve.access import digest_of
from flowinfer.serve.batch_store import BatchStore
from flowinfer.serve.batches import Batches
from flowinfer.serve.files import FileStore
from flowinfer.serve.openai.job import Limits
from flowinfer.serve.state import State

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
    while (batch := client.batches.retrieve(id)).status not in ("completed", "failed", "cancelled", "expired"):
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


def test_a_restart_goes_on_with_a_batch_and_asks_nothing_twice(start: Any, tmp_path: Path) -> None:
    before = start(None, state_path=str(tmp_path))
    client = before.client()
    file = upload(client, *[line(f"r{n}", f"text {n}") for n in range(5)], b"{nonsense\n")
    made = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    for _ in range(2):
        call = before.next_call()
        before.say(call.id, "before", finish="stop")
    while client.batches.retrieve(made.id).request_counts.completed < 2:
        time.sleep(0.01)
    client.files.delete(file)  # the batch has its own copy
    before.close()
    seen: list[Call] = []
    client = start(lambda call: [seen.append(call)] and list(echo(call)), state_path=str(tmp_path)).client()
    batch = ended(client, made.id)
    assert (batch.status, batch.request_counts.to_dict()) == ("completed", {"total": 6, "completed": 5, "failed": 1})
    answers = rows(client, batch.output_file_id)
    texts = [row["response"]["body"]["choices"][0]["message"]["content"] for row in answers.values()]
    assert sorted(answers) == [f"r{n}" for n in range(5)]
    assert texts.count("before") == 2
    assert len(seen) == 3
    assert not list(tmp_path.glob("files/*.input"))


def test_a_restart_keeps_files_and_sweeps_up_half_of_one(start: Any, tmp_path: Path) -> None:
    before = start(None, state_path=str(tmp_path))
    id = upload(before.client(), line("a", "1"))
    before.close()
    (tmp_path / "files" / "file-half").write_bytes(b"half")
    client = start(None, state_path=str(tmp_path)).client()
    assert client.files.content(id).content == line("a", "1")
    assert [path.name for path in (tmp_path / "files").iterdir()] == [id]


def test_a_batch_that_was_being_cancelled_ends_cancelled_after_a_restart(tmp_path: Path) -> None:
    state = State(str(tmp_path))
    store, files = BatchStore(state), FileStore(state)
    card = {"id": "batch_1", "status": "cancelling", "expires_at": time.time() + 60, "output_expires_after": None}
    store.add("", card, time.time() + 60)
    batches = Batches(state, files, Limits((), 8, 16, tools=False), never, lambda tenant: None)

    async def go_on() -> None:
        batches.resume()
        while batches.get("", "batch_1")["status"] == "cancelling":
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(go_on(), 10))
    assert batches.get("", "batch_1")["status"] == "cancelled"
    assert not store.unfinished()


async def never(*_: Any) -> None:
    raise AssertionError("nothing is asked")


def test_a_batch_whose_window_is_over_expires_with_what_it_has(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.serve.batches.WINDOW_S", 1)
    service = start()
    client = service.client()
    made = client.batches.create(
        input_file_id=upload(client, line("a", "1"), line("b", "2")), endpoint=CHAT, completion_window="24h"
    )
    service.say(service.next_call().id, "done", finish="stop")
    batch = ended(client, made.id)
    assert (batch.status, batch.request_counts.completed) == ("expired", 1)
    assert list(rows(client, batch.output_file_id)) == ["a"]


def test_files_expire(tmp_path: Path) -> None:
    store = FileStore(State(str(tmp_path)), ttl_s=10)
    ids = []
    for ttl_s in (None, 20):
        id, path = store.new_path()
        path.write_bytes(b"x")
        store.add("", id, "x", "batch", 0.0, ttl_s)
        ids.append(id)
    assert [file.id for file in store.list("", 15.0)] == ids[1:]
    with pytest.raises(RequestError):
        store.get("", ids[0], 15.0)
    store.expire(15.0)
    assert [path.name for path in (tmp_path / "files").iterdir()] == ids[1:]


def test_a_file_says_how_long_it_is_to_be_kept(start: Any) -> None:
    client = start(echo).client()
    after: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("in.jsonl", line("a", "1")), purpose="batch", expires_after=after)
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", output_expires_after={**after, "seconds": 7200}
    )
    output = client.files.retrieve(ended(client, made.id).output_file_id or "")
    assert output.expires_at is not None
    assert output.expires_at - output.created_at == 7200
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("in.jsonl", b"x"), purpose="batch", expires_after={**after, "seconds": 5})
    assert caught.value.param == "expires_after.seconds"


def test_a_batch_without_lines_fails_and_a_repeated_id_is_an_error_of_its_line(start: Any) -> None:
    client = start(echo).client()
    empty = client.batches.create(input_file_id=upload(client, b"\n\n"), endpoint=CHAT, completion_window="24h")
    batch = ended(client, empty.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")
    twice = upload(client, line("a", "1"), line("a", "2"))
    batch = ended(client, client.batches.create(input_file_id=twice, endpoint=CHAT, completion_window="24h").id)
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    assert "line 1" in client.files.content(batch.error_file_id).text


def test_lists_go_by_pages_in_both_orders(start: Any) -> None:
    client = start(echo).client()
    ids = [upload(client, line("a", str(n))) for n in range(3)]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == ids
    assert not client.files.list(purpose="fine-tune").data
    for query in ({"limit": "0"}, {"order": "up"}, {"after": "nothing"}, {"colour": "red"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.list(extra_query=query)
        assert caught.value.param in query


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
