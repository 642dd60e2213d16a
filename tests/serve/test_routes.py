"""Everything beside the answers: models, probes, metrics, and errors in the API's shape."""

from __future__ import annotations

import gzip
import socket
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import flowinfer
from flowinfer.message import Stats
from flowinfer.serve.server import HttpServer

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_models_are_listed_and_found(start: Any) -> None:
    client = start(models=("tiny", "org/big")).client()
    assert [model.id for model in client.models.list()] == ["tiny", "org/big"]
    assert client.models.retrieve("org/big").id == "org/big"


def test_an_unknown_model_is_404(service: Any) -> None:
    assert error_of(httpx.get(service.url + "/v1/models/none"), 404)["code"] == "model_not_found"


def test_health_ready_version(service: Any) -> None:
    assert httpx.get(service.url + "/health").json() == {"status": "ok"}
    assert httpx.get(service.url + "/ready").json() == {"status": "ready"}
    assert httpx.get(service.url + "/version").json() == {"version": flowinfer.__version__}


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/admin", "/metrics/x"])
def test_an_unknown_path_is_404(service: Any, path: str) -> None:
    assert error_of(httpx.get(service.url + path), 404)["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", CHAT), ("POST", "/v1/models"), ("DELETE", "/health")]
)
def test_a_wrong_method_is_405(service: Any, method: str, path: str) -> None:
    response = httpx.request(method, service.url + path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"]


def test_a_body_that_is_no_json_is_400(service: Any) -> None:
    assert error_of(httpx.post(service.url + CHAT, content=b"{not json"), 400)["code"] == "invalid_json"


def test_a_body_too_large_is_413_whether_declared_or_not(start: Any) -> None:
    service = start(max_body="1KiB")
    with pytest.raises(openai.APIStatusError) as caught:  # larger than what sockets take in: all of it is read
        service.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 20_000_000}])
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
    big = b"x" * 100_000
    assert error_of(httpx.post(service.url + CHAT, content=big), 413)["code"] == "request_too_large"
    chunked = (big[i : i + 500] for i in range(0, 5_000, 500))
    assert httpx.post(service.url + CHAT, content=chunked).status_code == 413


def test_a_compressed_body_is_refused_as_such(service: Any) -> None:
    headers = {"content-encoding": "gzip"}
    response = httpx.post(service.url + CHAT, content=gzip.compress(b"{}"), headers=headers)
    assert "'gzip'" in error_of(response, 415)["message"]


def test_the_request_id_is_echoed(echoing: Any) -> None:
    sent = {"x-request-id": "abc-1"}
    assert httpx.post(echoing.url + CHAT, json=ASK, headers=sent).headers["x-request-id"] == "abc-1"
    assert httpx.post(echoing.url + CHAT, json=ASK | {"stream": True}, headers=sent).headers["x-request-id"] == "abc-1"
    assert httpx.post(echoing.url + CHAT, json={}, headers=sent).headers["x-request-id"] == "abc-1"
    assert len(httpx.get(echoing.url + "/health").headers["x-request-id"]) >= 16


def test_a_service_without_the_openai_api_has_none_of_it(start: Any) -> None:
    service = start(apis=())
    assert httpx.post(service.url + CHAT, json=ASK).status_code == 404
    assert httpx.get(service.url + "/health").status_code == 200


def test_a_server_that_cannot_start_says_why(start: Any) -> None:
    listener = socket.socket()
    listener.close()
    server = HttpServer(start().gateway, listener)
    with pytest.raises(OSError):
        server.start()


# ------------------------------------------------------------------------------------------------------------- metrics


def scrape(service: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(service.url + "/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_are_counted_under_both_names(echoing: Any) -> None:
    before = scrape(echoing)
    assert httpx.post(echoing.url + CHAT, json=ASK).status_code == 200
    after = scrape(echoing)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert grown("flowinfer:requests_finished_total", reason="stop", worker="front.0") == 1
    assert grown("flowinfer:prompt_tokens_total", worker="front.0") == 3
    assert grown("flowinfer:generation_tokens_total", worker="front.0") == 2
    assert grown("flowinfer:time_to_first_token_seconds_count", worker="front.0") == 1
    assert grown("flowinfer:http_responses_total", path=CHAT, status="200", worker="front.0") == 1
    model = {"model_name": "tiny", "engine": "0"}
    assert grown("vllm:request_success_total", finished_reason="stop", **model) == 1
    assert grown("vllm:prompt_tokens_total", **model) == 3
    assert grown("vllm:e2e_request_latency_seconds_bucket", le="0.3", **model) == 1


def test_the_samples_of_other_workers_are_served(service: Any) -> None:
    before = scrape(service)  # what this process has counted itself, in other tests
    for worker, free in (("decode.0", 5.0), ("decode.1", 7.0)):
        samples = [
            ("flowinfer:kv_blocks_free", {}, free),
            ("flowinfer:spec_drafts_total", {}, free),
            ("flowinfer:kv_cache_usage_ratio", {}, free / 10),
        ]
        service.put(Stats(worker=worker, samples=samples))
    edge = {"edge": "api->tokenize"}
    own = [("flowinfer:edge_messages_total", edge, 9.0), ("flowinfer:late_pieces_total", {}, 1e9)]
    service.put(Stats(worker="front.0", samples=own))
    service.settle()
    seen = scrape(service)
    assert seen["flowinfer:edge_messages_total", (("edge", "api->tokenize"), ("worker", "front.0"))] == 9.0
    assert seen["flowinfer:late_pieces_total", (("worker", "front.0"),)] < 1e9  # the registry is fresher
    assert seen["flowinfer:kv_blocks_free", (("worker", "decode.1"),)] == 7.0
    labels = (("engine", "0"), ("model_name", "tiny"))
    drafts = ("vllm:spec_decode_num_drafts_total", labels)
    assert seen[drafts] - before.get(drafts, 0.0) == 12.0
    assert seen["vllm:kv_cache_usage_perc", labels] == 0.7


def test_vllm_names_can_be_switched_off(start: Any) -> None:
    assert "vllm:" not in httpx.get(start(vllm_metrics=False).url + "/metrics").text
