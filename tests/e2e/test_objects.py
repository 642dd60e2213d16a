"""The object tier in a service of true processes over an S3 server: what one life of it stored, the next one finds."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Service, Stream, english, service


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of an S3 server with the bucket `kv-cache`, for which the environment has credentials."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    import boto3

    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="kv-cache")
    yield endpoint
    server.stop()


def counted(running: Service, event: str) -> int:
    """Blocks of the object tier that this happened to."""
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/metrics") as answer:
        text = answer.read().decode()
    rows = [row for row in text.splitlines() if row.startswith("flowinfer:cache_tier_blocks_total{")]
    return sum(int(float(row.split()[-1])) for row in rows if f'event="{event}"' in row and 'tier="object"' in row)


def num_found(stream: Stream) -> int:
    return int((stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def test_what_one_life_of_a_service_stored_in_s3_the_next_one_finds(smollm2: Path, s3: str) -> None:
    settings = (
        "stages.prefill.with.dtype=float32",
        "stages.lookup.with.tiers.write=all",
        "stages.lookup.with.tiers.object.url=s3://kv-cache/a/folder",
        f"stages.lookup.with.tiers.object.options.endpoint={s3}",
        "stages.lookup.with.tiers.object.options.region=us-east-1",
        "stages.lookup.with.tiers.object.options.allow_http=true",
    )
    prompt = english(200, 3)
    with service("quickstart.yaml", *settings) as running:
        first = running.complete(prompt, 8)
        kept_back = running.complete(english(200, 4), 2, cache_retention=0)
        assert num_found(first) == num_found(kept_back) == 0
    with service("quickstart.yaml", *settings) as running:
        again = running.complete(prompt, 8)
        assert again.text == first.text and num_found(again) >= 128
        assert counted(running, "restored") == num_found(again) // 64
        assert num_found(running.complete(english(200, 4), 2)) == 0  # of that, nothing was stored
    assert re.search(r"\w", first.text)
