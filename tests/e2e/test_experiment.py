"""An experiment over a real model in true processes: arm B decodes in a worker of its own, and answers as arm A."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from harness import ROOT, Service, prompt_ids

from flowinfer.experiment.policy import place
from flowinfer.experiment.record import read, records
from flowinfer.graph import load_plan
from flowinfer.graph.plan import Plan
from flowinfer.runtime.rewire.control import ask, running
from flowinfer.runtime.rewire.experiment import stopped
from flowinfer.runtime.rewire.protocol import Manner, Reply, Request

EXPERIMENT = ROOT / "pipelines" / "experiments" / "live-no-speculation.yaml"
SETS = ("workers.prefill.threads=1", "workers.decode.threads=1", "stages.prefill.with.dtype=float32", "serve.port=0")
SESSIONS = [f"visitor {number}" for number in range(6)]
PROMPTS = [prompt_ids(12 + 40 * number, number, "flowinfer-mini") for number in range(3)]
MAX_TOKENS = 12


@pytest.fixture
def folder(prod: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the service, which has no experiment when the test ends."""
    folder = next(path for service, path in running() if service.pid == prod.process.pid)
    before = status(folder)
    yield folder
    if status(folder).experiment is not None:
        assert apply(folder, before).ok


def status(folder: Path) -> Plan:
    (reply,) = ask(folder, Request(do="status"))
    assert reply.plan is not None
    return reply.plan


def apply(folder: Path, plan: Plan) -> Reply:
    *_, last = ask(folder, Request(do="apply", plan=plan, manner=Manner(probation_s=0.1)))
    return last


def answers(service: Service) -> dict[str, list[str]]:
    """What each session is answered, all of them at once."""

    def one(session: str) -> list[str]:
        return [service.complete(prompt, MAX_TOKENS, user=session).text for prompt in PROMPTS]

    with ThreadPoolExecutor(len(SESSIONS)) as pool:
        return dict(zip(SESSIONS, pool.map(one, SESSIONS), strict=True))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("how", ["split: 50%", "mirror: 100%"])
def test_both_arms_answer_alike_and_all_is_recorded(prod: Service, folder: Path, how: str) -> None:
    mode, share = how.split(": ")
    expected = [prod.complete(prompt, MAX_TOKENS).text for prompt in PROMPTS]
    other = "experiment.mirror" if mode == "split" else "experiment.split"
    more = (f"experiment.{mode}={share}", f"{other}=null", "experiment.stop_if={}", "experiment.max_open=32")
    plan = load_plan(EXPERIMENT, sets=[*SETS, *more])
    done = apply(folder, plan)
    assert done.ok, done.text
    for texts in answers(prod).values():
        assert texts == expected
    assert json.loads(httpx.get(f"http://127.0.0.1:{prod.port}/v1/models").text)["data"][0]["id"] == prod.model
    (reply,) = ask(folder, Request(do="status"))
    assert reply.source is not None
    ended = apply(folder, load_plan(EXPERIMENT, sets=[*SETS, *more, *stopped(reply.source).sets[-1:]]))
    assert ended.ok, ended.text
    recorded = read(records("prod", "no-speculation")[-1])
    assert recorded.end is not None and recorded.end.reason == "ended"
    if mode == "mirror":
        given_up = recorded.end.dropped.get("closing", 0)  # copies that hadn't ended when the experiment did
        assert recorded.pairs and len(recorded.pairs) + given_up == len(SESSIONS) * len(PROMPTS)
        assert [pair.at for pair in recorded.pairs if pair.at is not None or pair.b.error] == []
        return
    in_b = sum(place(session, "no-speculation") < 0.5 for session in SESSIONS)
    assert 0 < in_b < len(SESSIONS)
    counts = [sum(outcome.arm == arm and not outcome.error for outcome in recorded.outcomes) for arm in "ab"]
    assert counts == [(len(SESSIONS) - in_b) * len(PROMPTS), in_b * len(PROMPTS)]
