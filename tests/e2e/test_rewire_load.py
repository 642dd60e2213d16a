"""Every kind of change under load: no request lost, repeated or failed, greedy answers unchanged, no long pause."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_rewire import Report, load
from decode_loop import save_random_llama
from harness import Service, service

from flowinfer.text.tokenizer import load_tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny_chat"
ONE_THREAD = ("workers.prefill.threads=1", "workers.decode.threads=1", "stages.prefill.with.dtype=float32")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """pipelines/prod.yaml over a random Llama, in processes of their own."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(TINY, folder)
    save_random_llama(folder, load_tokenizer(TINY).vocab_size, 512)
    memory = ("workers.prefill.kv_memory=64MiB", "workers.decode.kv_memory=64MiB")
    with service(
        "prod.yaml", f"vars.model={folder}", "stages.verify.with.draft=ngram", *ONE_THREAD, *memory
    ) as running:
        yield running


def check(report: Report) -> None:
    text = "\n".join(report.lines())
    assert report.wrong == [], text
    assert all(not found.refused for found in report.findings), text
    assert report.num_right > 0 and report.num_moved > 0, text


def test_changes_under_load_go_unnoticed(small: Service) -> None:
    """Pauses aren't judged here: the machine of a test run has other work."""
    check(load(small, streams=4, swaps=1, max_tokens=300, calm_s=0.5))


@pytest.mark.slow
@pytest.mark.model
def test_changes_under_32_streams_go_unnoticed(smollm2: Path) -> None:
    with service("prod.yaml", "vars.model=smollm2-135m", *ONE_THREAD) as running:
        report = load(running, streams=32, swaps=20, max_tokens=48, calm_s=20.0)
    check(report)
    assert all(found.pause <= report.limit for found in report.findings), "\n".join(report.lines())
