"""The stage over whole steps: stops that span tokens, cancels upstream, usage, logprobs, nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.fakes import FakeContext
from flowinfer.message import Ended, Finish, Opening, Piece, ReplyFormat, Sampling, TokenLogprob, Tokens, WorkerDown
from flowinfer.stage import ports
from flowinfer.stages.detokenize.stage import Detokenize
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

TINY = Path(__file__).resolve().parents[2] / "tests" / "data" / "tiny_chat"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(TINY)


@pytest.fixture
def stage(tokenizer: TextTokenizer) -> Detokenize:
    stage = Detokenize(Detokenize.Config(), FakeContext())
    stage.use(tokenizer)
    return stage


def opening(request: str = "a", **sampling: Any) -> Opening:
    return Opening(id=request, sampling=Sampling(**sampling), prompt_tokens=7, cached_tokens=3)


def batch(rows: dict[str, list[int]], opened: list[Opening] = [], **rest: Any) -> Tokens:  # noqa: B006 - never changed
    flat = [token for row in rows.values() for token in row]
    counts = [len(row) for row in rows.values()]
    return Tokens(
        step=1,
        ids=list(rows),
        counts=np.array(counts, np.int32),
        tokens=np.array(flat, np.int32),
        opened=opened,
        **rest,
    )


def run(stage: Detokenize, *batches: Tokens) -> list[Piece]:
    return [piece for one in batches for text in stage.step([one]) for piece in text.pieces]


def finish_of(pieces: list[Piece]) -> Finish:
    (finish,) = [piece.finish for piece in pieces if piece.finish is not None]
    assert pieces[-1].finish is finish
    return finish


def ids_of(tokenizer: TextTokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode_plain(text).tolist()
    return ids


def test_ports() -> None:
    inputs, outputs = ports(Detokenize)
    assert [port.name for port in (*inputs, *outputs)] == ["tokens", "text"]
    assert Detokenize.kind == "detokenize"


def test_sequences_of_a_step_get_their_own_text(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    rows = {"a": ids_of(tokenizer, "Paris"), "b": ids_of(tokenizer, "你好"), "c": []}
    pieces = run(stage, batch(rows, [opening("a"), opening("b"), opening("c")]))
    assert {piece.id: piece.text for piece in pieces} == {"a": "Paris", "b": "你好"}
    assert {piece.id: piece.tokens for piece in pieces} == {"a": rows["a"], "b": rows["b"]}


def test_the_models_end_flushes_text_and_fills_in_usage(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    ids = ids_of(tokenizer, "Paris☃")[:-1]
    end = Finish(reason="stop", stop=2, completion_tokens=len(ids) + 1, drafted_tokens=4, accepted_tokens=2)
    pieces = run(stage, batch({"a": ids}, [opening()]), batch({"a": [2]}, finished={0: end}))
    assert "".join(piece.text for piece in pieces) == "Paris\ufffd"
    assert finish_of(pieces) == Finish(
        reason="stop",
        stop=2,
        prompt_tokens=7,
        cached_tokens=3,
        completion_tokens=len(ids) + 1,
        drafted_tokens=4,
        accepted_tokens=2,
    )
    assert stage.num_open == 0


def test_a_stop_token_that_is_text_isnt_shown(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    ids = ids_of(tokenizer, "Paris!")
    pieces = run(stage, batch({"a": ids}, [opening()], finished={0: Finish(reason="stop", stop=ids[-1])}))
    assert "".join(piece.text for piece in pieces) == "Paris"


@pytest.mark.parametrize("step_size", [1, 2, 100])
def test_a_stop_string_cuts_text_and_names_itself(stage: Detokenize, tokenizer: TextTokenizer, step_size: int) -> None:
    ids, stop = ids_of(tokenizer, "one, two; three, four"), "; th"
    steps = [ids[n : n + step_size] for n in range(0, len(ids), step_size)]
    batches = [batch({"a": step}, [opening(stop=(stop,))] if n == 0 else []) for n, step in enumerate(steps)]
    pieces = run(stage, *batches)
    taken = next(n for n in range(len(ids)) if stop in tokenizer.decode(ids[:n]))
    assert "".join(piece.text for piece in pieces) == "one, two"
    assert finish_of(pieces) == Finish(
        reason="stop", stop=stop, prompt_tokens=7, cached_tokens=3, completion_tokens=taken
    )
    assert [token for piece in pieces for token in piece.tokens] == ids[:taken]
    assert stage.num_open == 0


def test_a_stop_in_the_models_last_step_needs_no_cancel(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    ids = ids_of(tokenizer, "one STOP two")
    end = Finish(reason="length", completion_tokens=len(ids))
    pieces = run(stage, batch({"a": ids}, [opening(stop=("STOP",))], finished={0: end}))
    assert (pieces[0].text, finish_of(pieces).reason, finish_of(pieces).stop) == ("one ", "stop", "STOP")


def test_tokens_behind_a_stop_are_ignored(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    ids = ids_of(tokenizer, "one STOP two")
    run(stage, batch({"a": ids}, [opening(stop=("STOP",))]))
    assert run(stage, batch({"a": ids}, finished={0: Finish(reason="length")})) == []


def test_held_text_goes_out_when_it_wasnt_a_stop(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    pieces = run(stage, batch({"a": ids_of(tokenizer, "x##")}, [opening(stop=("###",))]))
    assert [piece.text for piece in pieces] == ["x"]
    pieces = run(stage, batch({"a": [2]}, finished={0: Finish(reason="length")}))
    assert [piece.text for piece in pieces] == ["##"]


def test_min_tokens_puts_stops_off(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    ids = ids_of(tokenizer, "a#b#c")
    first = next(n for n in range(len(ids)) if "#" in tokenizer.decode(ids[:n]))
    pieces = run(stage, batch({"a": ids}, [opening(stop=("#",), min_tokens=first + 1)]))
    assert "".join(piece.text for piece in pieces) == "a#b"


def test_logprobs_carry_bytes(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    half = ids_of(tokenizer, "☃")[0]
    entries = [TokenLogprob(half, -0.5, [(half, -0.5), (2, -3.0)])]
    end = {0: Finish(reason="length")}
    (piece,) = run(stage, batch({"a": [half]}, [opening(logprobs=2)], logprobs={0: entries}, finished=end))
    (entry,) = piece.logprobs
    assert entry.data == tokenizer.token_bytes(half)
    assert [top[0] for top in entry.top] == [entry.text, "<|im_end|>"]
    assert [top[1:] for top in entry.top] == [(-0.5, entry.data), (-3.0, b"<|im_end|>")]


def test_cancelled_and_ended_requests_are_forgotten(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    run(stage, batch({"a": [], "b": [], "c": []}, [opening("a"), opening("b"), opening("c")]))
    stage.cancel(["a", "unknown"])
    stage.observe(Ended(ids=["b"]))
    assert stage.num_open == 1
    assert [piece.id for piece in run(stage, batch(dict.fromkeys("abc", ids_of(tokenizer, "x"))))] == ["c"]


ANSWER = '<think>\nSo.\n</think>\n\nWell.\n<tool_call>\n{"name": "f", "arguments": {"a": "☃ END"}}\n</tool_call>'
FORM = ReplyFormat(reasoning="think", tools="hermes")


@pytest.mark.parametrize("step_size", [1, 3, 1000])
def test_an_answer_is_taken_apart(stage: Detokenize, tokenizer: TextTokenizer, step_size: int) -> None:
    ids = ids_of(tokenizer, ANSWER)
    steps = [ids[n : n + step_size] for n in range(0, len(ids), step_size)]
    batches = [batch({"a": step}, [opening(reply=FORM)] if n == 0 else []) for n, step in enumerate(steps)]
    pieces = run(stage, *batches, batch({"a": [2]}, finished={0: Finish(reason="stop", stop=2)}))
    calls = [call for piece in pieces for call in piece.calls]
    assert "".join(piece.reasoning for piece in pieces) == "So."
    assert "".join(piece.text for piece in pieces) == "Well."
    assert (calls[0].name, "".join(call.arguments for call in calls)) == ("f", '{"a": "☃ END"}')
    thought = ids_of(tokenizer, ANSWER[: ANSWER.index("</think>") + 8])
    assert finish_of(pieces).reasoning_tokens == len(thought) - len(ids_of(tokenizer, "<think>"))


def test_a_stop_string_counts_in_arguments_too(stage: Detokenize, tokenizer: TextTokenizer) -> None:
    pieces = run(stage, batch({"a": ids_of(tokenizer, ANSWER)}, [opening(reply=FORM, stop=("END",))]))
    assert (pieces[0].calls[0].arguments, finish_of(pieces).stop) == ('{"a": "☃ ', "END")


@pytest.mark.parametrize("step_size", [1, 2, 5, 1000])
@pytest.mark.parametrize("stop", ["</think", "So.\n</thinking>", "\n\nWell!", "Well.\n<tool"])
def test_a_stop_held_back_over_the_end_of_reasoning_lets_none_of_it_leak(
    stage: Detokenize, tokenizer: TextTokenizer, step_size: int, stop: str
) -> None:
    ids = ids_of(tokenizer, ANSWER)
    steps = [ids[n : n + step_size] for n in range(0, len(ids), step_size)]
    opened = opening(reply=FORM, stop=(stop,))
    pieces = run(
        stage,
        *(batch({"a": step}, [opened] if n == 0 else []) for n, step in enumerate(steps)),
        batch({"a": [2]}, finished={0: Finish(reason="stop", stop=2)}),
    )
    assert "".join(piece.reasoning for piece in pieces) == "So."
    cut = stop in ANSWER
    assert "".join(piece.text for piece in pieces) == ("" if cut else "Well.")
    assert any(piece.calls for piece in pieces) != cut


def test_a_special_token_that_is_a_marker_is_seen_by_the_parser_only(
    tokenizer: TextTokenizer,
) -> None:
    marker = next(iter(tokenizer.vocabulary.special_ids))
    text = tokenizer.vocabulary.added[marker]
    assert tokenizer.glyphs().text_of(marker) == ""
    assert tokenizer.glyphs(shown=(f"<{text}f>",)).text_of(marker) == text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_join_to_the_full_decode_over_any_steps(
    stage: Detokenize, tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    steps = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    stop = data.draw(st.sampled_from([(), ("never seen here",)]))
    batches = [batch({"a": step}, [opening(stop=stop)] if n == 0 else []) for n, step in enumerate(steps)]
    pieces = run(stage, *batches, batch({"a": []}, finished={0: Finish(reason="length")}))
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
    assert [token for piece in pieces for token in piece.tokens] == ids
    assert stage.num_open == 0


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_of_two_workers_come_out_in_order_and_once(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    """A sequence moved: what either worker gave arrives in its own order, but the two in any, and some twice."""
    ids = ids_of(tokenizer, "one, two; three ☃ four, five ✈ six")
    cut = data.draw(st.integers(1, len(ids) - 1))
    again = data.draw(st.integers(0, cut))  # the new worker repeats what the old one gave behind this
    moved = opening(logprobs=0) if data.draw(st.booleans()) else opening()
    moved.before, moved.giver = np.array(ids[:again], np.int32), "decode.0"
    old = steps_of(data, ids, 0, cut, opening(logprobs=moved.sampling.logprobs))
    new = steps_of(data, ids, again, len(ids), moved)
    new[-1].finished = {0: Finish(reason="length", completion_tokens=len(ids))}
    context = FakeContext()
    stage = Detokenize(Detokenize.Config(), context)
    stage.use(tokenizer)
    mixed: list[Tokens] = []
    while old or new:
        mixed.append((old if old and (not new or data.draw(st.booleans())) else new).pop(0))
    pieces = []
    for one in mixed:
        pieces += run(stage, one)
        context.over.update(piece.id for piece in pieces if piece.finish)
    assert "".join(piece.text for piece in pieces) == "one, two; three ☃ four, five ✈ six"
    assert [token for piece in pieces for token in piece.tokens] == ids
    assert finish_of(pieces).completion_tokens == len(ids)
    assert stage.num_open == 0


def steps_of(data: st.DataObject, ids: list[int], start: int, end: int, opened: Opening) -> list[Tokens]:
    """Tokens start to end of an answer, in steps of some tokens."""
    steps: list[Tokens] = []
    while start < end:
        size = data.draw(st.integers(1, min(4, end - start)))
        entries = {0: [TokenLogprob(token, -1.0) for token in ids[start : start + size]]}
        extra: dict[str, Any] = {} if opened.sampling.logprobs is None else {"logprobs": entries}
        place = np.array([start], np.int32)
        steps.append(batch({"a": ids[start : start + size]}, [] if steps else [opened], positions=place, **extra))
        start += size
    return steps


def test_tokens_that_died_with_their_worker_came_with_who_goes_on(
    tokenizer: TextTokenizer,
) -> None:
    ids = ids_of(tokenizer, "one, two; three, four")
    stage = Detokenize(Detokenize.Config(), FakeContext())
    stage.use(tokenizer)
    moved = opening()
    moved.before, moved.giver = np.array(ids[:5], np.int32), "decode.0"
    pieces = run(stage, batch({"a": ids[:2]}, [opening()], positions=np.zeros(1, np.int32)))
    pieces += run(stage, batch({"a": ids[5:]}, [moved], positions=np.full(1, 5, np.int32)))
    assert "".join(piece.text for piece in pieces) == "one, two; three, four"


def test_log_probabilities_that_died_with_their_worker_fail_the_request(tokenizer: TextTokenizer) -> None:
    ids = ids_of(tokenizer, "one, two; three, four")
    context = FakeContext()
    stage = Detokenize(Detokenize.Config(), context)
    stage.use(tokenizer)
    moved = opening(logprobs=0)
    moved.before, moved.giver = np.array(ids[:5], np.int32), "decode.0"
    entries = {0: [TokenLogprob(token, -1.0) for token in ids[5:]]}
    assert run(stage, batch({"a": ids[5:]}, [moved], positions=np.full(1, 5, np.int32), logprobs=entries)) == []
    stage.observe(WorkerDown(worker="decode.1", generation=1))
    assert not context.failed
    stage.observe(WorkerDown(worker="decode.0", generation=1))
    assert context.failed["a"].code == "worker_died"
