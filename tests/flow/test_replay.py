"""Recordings of a graph of plain stages: what is kept, what a cut file gives, and that a replay repeats itself."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.cli import main
from flowinfer.codec import schema_of
from flowinfer.errors import FlowInferError
from flowinfer.flow.file import MAGIC, Recording, fields_of, read
from flowinfer.flow.record import Recorder, header_of
from flowinfer.flow.replay import against, by_request, cut, replay
from flowinfer.graph import load_plan
from flowinfer.graph.plan import Plan
from flowinfer.message import Call, Finish, Message, Piece, Prompt, Sampling, Text
from flowinfer.runtime.local import LocalService

STAGES = '''
from collections.abc import Iterable
import numpy as np
from flowinfer.message import Call, Finish, Piece, Prompt, Text
from flowinfer.stage import Stage, StageConfig

class Split(Stage):
    """Characters as token ids, in the background, as a tokenizer does."""

    def step(self, calls: list[Call]) -> Iterable[Prompt]:
        for call in calls:
            done = lambda ids, call=call: [self.prompt(call, ids)]
            self.ctx.submit(lambda call=call: [ord(c) for c in call.prompt], done)
        return []

    def prompt(self, call: Call, ids: list[int]) -> Prompt:
        return Prompt(id=call.id, tokens=np.array(ids, np.int32), sampling=call.sampling)

class Reverse(Stage):
    """Turns each prompt around, in place."""

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        for prompt in prompts:
            prompt.tokens = prompt.tokens[::-1].copy()
            yield prompt

class Join(Stage):
    """Says a character a step."""

    class Config(StageConfig):
        mark: str = ""

    def open(self) -> None:
        self.left: dict[str, list[str]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def step(self, prompts: list[Prompt]) -> Iterable[Text]:
        for prompt in prompts:
            self.left[prompt.id] = [chr(t) for t in prompt.tokens]
        pieces = []
        for id, chars in list(self.left.items()):
            pieces.append(Piece(id=id, text=chars.pop(0) + self.config.mark if chars else ""))
            if not chars:
                pieces[-1].finish = Finish(reason="stop")
                del self.left[id]
        if pieces:
            yield Text(step=0, pieces=pieces)
'''
PIPELINE = """flowinfer: 1
name: plain
stages:
  split: {use: "./stages.py:Split"}
  reverse: {use: "./stages.py:Reverse"}
  join: {use: "./stages.py:Join"}
edges:
  api -> split:
  split -> reverse:
  reverse -> join:
  join -> api:
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "stages.py").write_text(STAGES)
    (tmp_path / "plain.yaml").write_text(PIPELINE)
    return load_plan(tmp_path / "plain.yaml", allow_local=True)


def recorded(plan: Plan, path: Path, *texts: str) -> Path:
    """A recording of these requests at once."""
    with LocalService(plan) as service:
        recorder = Recorder(service, path, header_of(plan, (), ()))
        service.generate(Call(id=f"r{i}", sampling=Sampling(), prompt=text) for i, text in enumerate(texts))
        recorder.close()
    return path


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> Path:
    """A recording of three requests at once."""
    return recorded(plan, tmp_path / "x.flow", "abc", "de", "f")


def prompts(recording: Recording, edge: str) -> list[str]:
    return ["".join(map(chr, r.message.tokens)) for r in recording.records if r.edge == edge]  # type: ignore[attr-defined]


def test_each_message_is_kept_as_it_was_when_it_passed(file: Path) -> None:
    recording = read(file)
    assert sorted(prompts(recording, "split -> reverse")) == ["abc", "de", "f"]
    assert sorted(prompts(recording, "reverse -> join")) == ["cba", "ed", "f"]
    assert not recording.cut_off
    times = [record.at for record in recording.records]
    assert times == sorted(times)


def test_a_file_cut_at_any_byte_gives_its_whole_messages(plan: Plan, tmp_path: Path) -> None:
    file = recorded(plan, tmp_path / "one.flow", "a")
    data, whole, short = file.read_bytes(), read(file), tmp_path / "short.flow"
    seen = set()
    for length in range(len(data)):
        short.write_bytes(data[:length])
        try:
            part = read(short)
        except FlowInferError as error:
            assert "is no recording" in str(error)
            continue
        seen.add(len(part.records))
        assert [r.edge for r in part.records] == [r.edge for r in whole.records][: len(part.records)]
    assert seen == set(range(len(whole.records))), "each message is there as soon as its last byte is"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_an_error_of_ours_or_another_recording(
    file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    (tmp_path / "damaged.flow").write_bytes(damaged)
    with contextlib.suppress(FlowInferError):
        read(tmp_path / "damaged.flow")


def test_speed_is_that_of_the_recording_and_changes_nothing_else(file: Path, plan: Plan) -> None:
    recording, part = read(file), cut(plan, "reverse", "join")
    for number, record in enumerate(recording.records):
        record.at = 0.02 * number
    last = max(record.at for record in recording.records if record.edge in ("", "split -> reverse"))
    at_once = replay(recording, part)
    began = time.perf_counter()
    paced = replay(recording, part, speed=2.0)
    assert time.perf_counter() - began >= last / 2
    assert [str(r) for r in paced] == [str(r) for r in at_once]


def test_a_replay_through_a_part_repeats_itself_and_the_recording(file: Path, plan: Plan) -> None:
    recording, part = read(file), cut(plan, "reverse", "join")
    assert part.stages == ("reverse", "join")
    first, second = replay(recording, part), replay(recording, part)
    assert [str(r) for r in first] == [str(r) for r in second]
    (outcome,) = against(recording, first, part)
    assert (outcome.edge, outcome.num_same, outcome.differing) == ("join -> api", 3, [])


def test_the_whole_graph_is_replayed_by_default(file: Path, plan: Plan) -> None:
    part = cut(plan)
    assert part.stages == ("split", "reverse", "join")
    assert against(read(file), replay(read(file), part), part)[0].num_same == 3


def test_a_changed_stage_is_found_with_its_first_request(file: Path, plan: Plan, tmp_path: Path) -> None:
    runner, pipeline = CliRunner(), str(tmp_path / "plain.yaml")
    same = runner.invoke(main, ["replay", str(file), "--from", "join", "--allow-local"])
    assert same.exit_code == 0, same.output
    assert "join -> api: 3 requests the same, 0 differ" in same.output
    changed = ["--from", "join", "--set", "stages.join.with.mark=x", "--pipeline", pipeline, "--allow-local"]
    result = runner.invoke(main, ["replay", str(file), *changed])
    assert result.exit_code == 1
    assert "recorded cba[stop]" in result.output and "replayed cxbxax[stop]" in result.output


def test_record_writes_what_replay_reads(plan: Plan, tmp_path: Path) -> None:
    asks, out = tmp_path / "asks.jsonl", tmp_path / "y.flow"
    asks.write_text('{"prompt": "hello"}\n{"prompt": "you"}\n')
    runner = CliRunner()
    arguments = [str(tmp_path / "plain.yaml"), "-o", str(out), "--on", str(asks), "--allow-local"]
    recorded = runner.invoke(main, ["record", *arguments])
    assert recorded.exit_code == 0, recorded.output
    assert "2 requests" in recorded.output
    assert runner.invoke(main, ["replay", str(out), "--to", "reverse", "--allow-local"]).exit_code == 0


def test_a_speed_that_is_none(file: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(file), "--speed", "0"])
    assert result.exit_code == 2
    assert "'0' is neither a factor above 0, as in 10, nor max." in result.output


@pytest.mark.parametrize(("first", "last", "message"), [("join", "split", "No way leads"), ("jion", "", "no stage")])
def test_a_cut_that_is_none(first: str, last: str, message: str, plan: Plan) -> None:
    with pytest.raises(FlowInferError, match=message):
        cut(plan, first, last)


def test_a_loop_stays_whole() -> None:
    plan = load_plan(Path(__file__).parents[2] / "pipelines" / "quickstart.yaml")
    part = cut(plan, "prefill", "verify")
    assert part.stages == ("prefill", "transfer", "decode", "verify")
    assert [edge.name for edge in part.inward] == ["lookup -> prefill"]
    assert "decode -> verify" in header_of(plan, (), ()).skipped


def test_keys_and_values_are_not_in_a_recording() -> None:
    plan = load_plan(Path(__file__).parents[2] / "pipelines" / "quickstart.yaml")
    with pytest.raises(FlowInferError, match="transfer -> decode carries keys and values"):
        cut(plan, "verify", "detokenize")


def test_batches_do_not_matter_to_what_is_said_of_a_request() -> None:
    a, b = Piece(id="a", text="x"), Piece(id="b", text="y", finish=Finish(reason="length"))
    together = by_request([Text(step=1, pieces=[a, b])])
    assert together == by_request([Text(step=1, pieces=[b]), Text(step=2, pieces=[a])]) == {"a": "x", "b": "y[length]"}


def test_what_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    with pytest.raises(FlowInferError, match="is no recording"):
        read(tmp_path / "x")


def older(path: Path, kind: type[Message], num_fields: int) -> None:
    """Makes the file one of when this type had only its first fields."""
    data, header = path.read_bytes(), read(path).header
    header.fields = header.fields | {kind.__name__: header.fields[kind.__name__][:num_fields]}
    parts, at = [msgspec.json.encode(header)], len(MAGIC)
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    for index, part in enumerate(parts[2:], start=2):
        when, edge, (first, *rest) = msgspec.msgpack.decode(part)
        end = 4 + struct.unpack_from("<H", first, 2)[0]
        if msgspec.msgpack.decode(first[4:end])[0] == kind.__name__:
            body = [message[:num_fields] for message in msgspec.msgpack.decode(first[end:])]
            parts[index] = msgspec.msgpack.encode((when, edge, [first[:end] + msgspec.msgpack.encode(body), *rest]))
    del parts[1]
    path.write_bytes(MAGIC + b"".join(struct.pack("<I", len(part)) + part for part in parts))


def test_a_recording_outlives_fields_that_its_messages_have_got_since(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts(read(file), "split -> reverse")
    older(file, Prompt, list(fields_of(Prompt)["Prompt"]).index("deadline"))
    monkeypatch.setattr("flowinfer.flow.file.schema_of", lambda cls: "newer" if cls is Prompt else schema_of(cls))
    assert prompts(read(file), "split -> reverse") == texts
    assert all(record.message.deadline is None for record in read(file, ["split -> reverse"]).records if record.edge)  # type: ignore[attr-defined]


def test_a_type_that_has_changed_is_told_where_it_is_needed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.flow.file.schema_of", lambda cls: "newer" if cls is Prompt else schema_of(cls))
    monkeypatch.setattr("flowinfer.flow.file.fields_of", lambda cls: {cls.__name__: {"words": True}})
    with pytest.raises(FlowInferError, match="messages of type Prompt as another version"):
        read(file)
    assert {record.edge for record in read(file, ["api -> split"]).records} == {"api -> split", ""}
