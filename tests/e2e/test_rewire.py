"""Stages of a service with a real model are swapped while it answers; greedy answers stay what they were."""

from __future__ import annotations

import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from drafters import save_random_head
from harness import Service, prompt_ids

from flowinfer.engine import hub
from flowinfer.graph.plan import Plan
from flowinfer.runtime.rewire.control import ask, running
from flowinfer.runtime.rewire.protocol import SERVICE, Manner, Reply, Request
from flowinfer.runtime.rewire.protocol import Service as About

PROMPTS = [prompt_ids(12 + 20 * i, i, "flowinfer-mini") for i in range(2)]
MAX_TOKENS = 12


class Streams:
    """Streams that are asked for again and again, each compared with its answer when nothing changed."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.expected = [service.complete(prompt, MAX_TOKENS).text for prompt in PROMPTS]
        self.num_right = 0
        self.answered = threading.Event()
        self.wrong: list[object] = []
        self._stop = False
        self._threads = [threading.Thread(target=self._loop, args=(i,)) for i in range(len(PROMPTS))]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()

    def _loop(self, i: int) -> None:
        while not self._stop and not self.wrong:
            try:
                text = self.service.complete(PROMPTS[i], MAX_TOKENS).text
            except Exception as error:
                self.wrong.append(error)
                return
            if text == self.expected[i]:
                self.num_right += 1
                self.answered.set()
            else:
                self.wrong.append(text)


@pytest.fixture
def folder(prod: Service) -> Iterator[Path]:
    """The folder of the service, which is as it was when the test ends."""
    folder = next(path for service, path in running() if service.pid == prod.process.pid)
    before = status(folder)
    yield folder
    if status(folder).stages != before.stages:
        assert change(folder, before).ok


def status(folder: Path) -> Plan:
    (reply,) = ask(folder, Request(do="status"))
    assert reply.plan is not None
    return reply.plan


def controller(folder: Path) -> int:
    """Process id of the supervisor."""
    return msgspec.json.decode((folder / SERVICE).read_bytes(), type=About).controller


def change(folder: Path, plan: Plan, *renew: str) -> Reply:
    *_, last = ask(folder, Request(do="apply", plan=plan, renew=renew, manner=Manner(probation_s=0.1)))
    return last


def with_config(plan: Plan, name: str, **config: object) -> Plan:
    stage = plan.stages[name]
    changed = msgspec.structs.replace(stage, config=stage.config | config)
    return msgspec.structs.replace(plan, stages=plan.stages | {name: changed})


def test_swaps_under_load_leave_greedy_answers_as_they_were(prod: Service, folder: Path) -> None:
    with Streams(prod) as streams:
        for stage, draft in (("detokenize", "none"), ("route", "ngram")):
            done = change(folder, with_config(status(folder), "verify", draft=draft, tokens=3), stage)
            assert done.ok, done.text
    assert streams.wrong == []
    assert streams.num_right >= len(PROMPTS)
    assert status(folder).epoch >= 3


def test_what_drafts_changes_under_load(prod: Service, folder: Path, tmp_path: Path) -> None:
    head = tmp_path / "draft.safetensors"
    save_random_head(hub.resolve(prod.model), head)
    ways = ({"draft": "head", "head": str(head), "tokens": 5, "schedule": "fixed"}, {"draft": "suffix", "tokens": 8})
    with Streams(prod) as streams:
        for config in ways:
            done, answered = change(folder, with_config(status(folder), "verify", **config)), streams.num_right
            assert done.ok, done.text
            drafted = num_drafted(prod)
            while (streams.num_right < answered + 4 or num_drafted(prod) == drafted) and not streams.wrong:
                streams.answered.wait(10)
                streams.answered.clear()
    assert streams.wrong == []


def num_drafted(service: Service) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/metrics") as answer:
        found = re.findall(r"^flowinfer:spec_draft_tokens_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def test_a_controller_that_is_killed_in_a_swap_leaves_answers_as_they_were(prod: Service, folder: Path) -> None:
    before = status(folder).epoch
    with Streams(prod) as streams:
        for step in ("prepare", "drain"):
            told = []
            for reply in ask(
                folder, Request(do="apply", plan=status(folder), renew=("detokenize",), manner=Manner(probation_s=0.1))
            ):
                told.append(reply.text)
                if reply.text.startswith(step) and len(told) < 10 and not any("takeover" in text for text in told):
                    os.kill(controller(folder), signal.SIGKILL)
            assert any(text.startswith("takeover") for text in told), told
    assert streams.wrong == []
    assert streams.num_right >= len(PROMPTS)
    assert before < status(folder).epoch <= before + 2
