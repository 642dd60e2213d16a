"""Messages in a few lines: tensors by shape and range, long things cut."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.message import Call, Logits, Prompt, Sampling
from flowinfer.observe.summary import summarize, tensor


def test_a_prompt_is_told_by_shape_and_range_without_its_defaults() -> None:
    told = summarize(Prompt(id="a", tokens=np.array([5, 9, 1], np.int32), sampling=Sampling(temperature=0.0)))
    assert told == {
        "type": "Prompt",
        "id": "a",
        "tokens": {"shape": [3], "dtype": "int32", "min": 1, "max": 9, "mean": 5.0},
        "sampling": {"temperature": 0.0},
    }


def test_a_tensor_of_torch_is_told_too_and_half_precision() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.bfloat16)
    told = summarize(Logits(step=1, slots=np.zeros(0, np.int32), starts=np.zeros(1, np.int32), logits=logits))
    assert told["logits"] == {"shape": [2, 2], "dtype": "bfloat16", "min": 1.0, "max": 6.0, "mean": 3.0}
    assert told["slots"] == {"shape": [0], "dtype": "int32"}


def test_what_is_not_a_number_can_be_written() -> None:
    told = tensor(np.array([np.nan, np.inf], np.float32))
    assert told["max"] == "nan"
    msgspec.json.encode(told)


def test_a_tensor_elsewhere_is_not_read() -> None:
    assert tensor(torch.empty(4, 2, device="meta")) == {"shape": [4, 2], "dtype": "float32", "device": "meta"}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("x" * 5_000),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=3), inner, max_size=12),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), max_size=4))
def test_whatever_a_request_holds_its_summary_is_json(messages: list[dict[str, object]]) -> None:
    told = summarize(Call(id="a", sampling=Sampling(), messages=messages))
    assert json.loads(msgspec.json.encode(told))["id"] == "a"
