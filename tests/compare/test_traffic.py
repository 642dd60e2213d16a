"""A trace as requests: what was shared is shared, lengths and times are the trace's or scaled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flowinfer.cache.keys import extend_chain
from flowinfer.compare.arms import Waits
from flowinfer.compare.asks import Ask, load_asks
from flowinfer.compare.traffic import TraceOptions
from flowinfer.errors import FlowInferError
from flowinfer.sim.trace import read_trace

HEAD = Path(__file__).parents[1] / "data/traces/mooncake_conversation_head.jsonl"


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize(("scale", "size"), [(1.0, 512), (1 / 16, 32), (1 / 512, 1)])
def test_prompts_share_exactly_what_the_traced_ones_shared(scale: float, size: int) -> None:
    trace, asks = read_trace(HEAD), load_asks(str(HEAD), TraceOptions(first=40, scale=scale))
    prompts = [ask.body["prompt"] for ask in asks]
    for i, request in enumerate(trace.requests[:40]):
        assert len(prompts[i]) == pytest.approx(request.input_length * scale, abs=2)
        for j in range(i):
            other = trace.requests[j]
            blocks = shared(list(request.blocks), list(other.blocks))  # type: ignore[arg-type]
            wanted = min(blocks * size, len(prompts[i]), len(prompts[j]))
            assert wanted <= shared(prompts[i], prompts[j]) <= wanted + (2 if size > 1 else 4)  # by chance a few more


def test_a_cache_of_block_names_finds_what_the_trace_says() -> None:
    """Hits of an endless cache over the made prompts, a name for each 32 tokens, are those over the hash ids."""
    trace, asks = read_trace(HEAD), load_asks(str(HEAD), TraceOptions(scale=1 / 16))
    seen: set[bytes] = set()
    known: set[bytes] = set()
    found = expected = 0
    for request, ask in zip(trace.requests, asks, strict=True):
        tokens = np.array(ask.body["prompt"], np.int32)
        whole = len(tokens) // 32
        names = extend_chain(None, tokens[: whole * 32], namespace="", salt="", block_tokens=32)
        found += next((i for i, name in enumerate(names) if name not in seen), len(names))
        blocks = request.blocks[:whole]
        expected += next((i for i, name in enumerate(blocks) if name not in known), len(blocks))
        seen.update(names)
        known.update(blocks)
    assert found == expected > 0


def test_times_and_lengths_are_scaled() -> None:
    plain, fast = load_asks(str(HEAD)), load_asks(str(HEAD), TraceOptions(speed=4, scale=0.5))
    assert [ask.at for ask in fast] == pytest.approx([ask.at / 4 for ask in plain])
    assert plain[0].at == 0.0 and max(ask.at for ask in plain) > 1.0
    assert [ask.body["max_tokens"] for ask in fast[:3]] == [250, 245, 397]
    assert all(ask.body["ignore_eos"] for ask in plain)


def test_a_scale_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(FlowInferError, match="has none left"):
        load_asks(str(HEAD), TraceOptions(scale=0.0001))


def test_a_broken_line_of_a_trace_is_named(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    file.write_text(json.dumps(good) + "\n" + json.dumps(good | {"input_length": "x"}) + "\n")
    with pytest.raises(FlowInferError, match=r"t.jsonl:2 is no request"):
        load_asks(str(file))


def test_requests_go_at_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr("flowinfer.compare.arms.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(
        "flowinfer.compare.arms.time.sleep", lambda s: (slept.append(round(s, 6)), now.__setitem__(0, now[0] + s))
    )
    asks = [Ask(str(i), "", {}, at) for i, at in enumerate((7.0, 7.0, 7.5, 8.25))]
    waits = Waits(asks)
    for ask in asks:
        waits.until(ask)
    assert slept == [0.5, 0.75]
