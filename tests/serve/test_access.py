"""Keys, tenants, limits, CORS and HTTPS."""

from __future__ import annotations

import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.errors import RequestError
from flowinfer.serve.access import Access, digest_of, tenant_salt
from flowinfer.serve.server import STOP_TIMEOUT_S

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}]}
KEYS = {"ann": digest_of("secret-a"), "bob": digest_of("secret-b")}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"authorization": "Bearer"}, {"authorization": "Basic secret-a"}]
)
def test_without_a_known_key_nothing_is_answered(start: Any, headers: dict[str, str]) -> None:
    service = start(keys=KEYS)
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nothing")):
        response = httpx.request(method, service.url + path, headers=headers, json=ASK if method == "POST" else None)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert service.calls.empty()


def test_probes_and_metrics_need_no_key(start: Any) -> None:
    service = start(keys=KEYS)
    assert [httpx.get(service.url + path).status_code for path in ("/health", "/ready", "/version", "/metrics")] == [
        200
    ] * 4


def test_both_ways_to_send_a_key_and_no_tenant_shares_with_another(start: Any) -> None:
    service = start(keys=KEYS)
    salts = []
    for headers in (bearer("secret-a"), {"x-api-key": "secret-a"}, bearer("secret-b")):
        thread = threading.Thread(
            target=httpx.post, args=(service.url + CHAT,), kwargs={"json": ASK, "headers": headers}
        )
        thread.start()
        call = service.calls.get(timeout=10)
        salts.append(call.cache_salt)
        service.say(call.id, "x", finish="stop")
        thread.join()
    assert salts[0] == salts[1] != salts[2]
    assert all(salts)


def test_keys_of_the_environment(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWINFER_API_KEYS", "one, two")
    service = start()
    with pytest.raises(openai.AuthenticationError):
        service.client().models.list()
    for key in ("one", "two"):
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_key_has_its_share_of_open_requests(start: Any) -> None:
    service = start(keys=KEYS, key_requests=1)
    answers = []
    first = threading.Thread(
        target=lambda: answers.append(httpx.post(service.url + CHAT, json=ASK, headers=bearer("secret-a")))
    )
    first.start()
    call = service.calls.get(timeout=10)
    refused = httpx.post(service.url + CHAT, json=ASK, headers=bearer("secret-a"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert int(refused.headers["retry-after"]) >= 1
    other = threading.Thread(
        target=httpx.post, args=(service.url + CHAT,), kwargs={"json": ASK, "headers": bearer("secret-b")}
    )
    other.start()
    service.say(service.calls.get(timeout=10).id, "x", finish="stop")
    other.join()
    service.say(call.id, "x", finish="stop")
    first.join()
    assert answers[0].status_code == 200
    assert httpx.get(service.url + "/v1/models", headers=bearer("secret-a")).status_code == 200


def test_a_rate_lets_through_a_minutes_worth_and_then_so_many_a_minute() -> None:
    access = Access(KEYS, per_minute=6)
    for _ in range(6):
        access.enter("ann", 1000.0)
        access.leave("ann")
    with pytest.raises(RequestError) as caught:
        access.enter("ann", 1000.0)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == pytest.approx(10.0)
    access.enter("bob", 1000.0)
    access.enter("ann", 1010.0)
    with pytest.raises(RequestError):
        access.enter("ann", 1019.0)
    access.enter("ann", 1020.0)


@given(st.tuples(st.text(max_size=5), st.text(max_size=5)), st.tuples(st.text(max_size=5), st.text(max_size=5)))
def test_salts_of_two_tenants_never_meet(one: tuple[str, str], other: tuple[str, str]) -> None:
    if one[0] and other[0]:
        assert (tenant_salt(*one) == tenant_salt(*other)) == (one == other)


def test_only_pages_of_the_named_origins_may_ask(start: Any) -> None:
    service = start(cors=("https://chat.example.org/",), keys=KEYS)
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    good = httpx.options(service.url + CHAT, headers={"origin": "https://chat.example.org", **wanted})
    assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, "https://chat.example.org")
    bad = httpx.options(service.url + CHAT, headers={"origin": "https://evil.example.org", **wanted})
    assert "access-control-allow-origin" not in bad.headers
    answer = httpx.get(service.url + "/version", headers={"origin": "https://chat.example.org"})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"


def test_https(start: Any) -> None:
    folder = Path(__file__).parent
    service = start(tls_cert=str(folder / "localhost.pem"), tls_key=str(folder / "localhost.key"))
    url = service.url.replace("http:", "https:")
    trusting = ssl.create_default_context(cafile=folder / "localhost.pem")
    assert httpx.get(f"{url}/health", verify=trusting).json() == {"status": "ok"}


def test_an_idle_client_of_tls_does_not_hold_up_the_end(start: Any) -> None:
    """It sends no answer to TLS's goodbye while nobody reads from its socket."""
    folder = Path(__file__).parent
    service = start(tls_cert=str(folder / "localhost.pem"), tls_key=str(folder / "localhost.key"))
    with httpx.Client(verify=ssl.create_default_context(cafile=folder / "localhost.pem")) as client:
        assert client.get(service.url.replace("http:", "https:") + "/health").status_code == 200
        began = time.monotonic()
        service.close()
        assert time.monotonic() - began < STOP_TIMEOUT_S
