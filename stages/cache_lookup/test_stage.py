"""The stage: hints from block events, tenants apart, in-flight sharing with timers and cancels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flowinfer.errors import StageError
from flowinfer.message import (
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    Cancel,
    Ended,
    Event,
    Failure,
    Message,
    Prompt,
    Sampling,
    WorkerDown,
)
from flowinfer.stage import Port, ports
from flowinfer.stages.cache_lookup.stage import CacheLookup


class FakeClock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class Context:
    """Only what the stage uses."""

    stage = "lookup"

    def shared(self, key: object, make: Callable[[], Any], *, arms: bool = False) -> Any:
        return make()

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.timers: list[tuple[float, Callable[[], Iterable[Message] | None]]] = []

    def call_at(self, when: float, fn: Callable[[], Iterable[Message] | None], *, request: str = "") -> None:
        self.timers.append((when, fn))

    def pass_time(self, seconds: float) -> list[str]:
        self.clock.time += seconds
        due = [fn for when, fn in self.timers if when <= self.clock.time]
        self.timers = [timer for timer in self.timers if timer[0] > self.clock.time]
        return [message.id for fn in due for message in fn() or ()]  # type: ignore[attr-defined]


MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model folder as far as its KV layout is read: the configuration and an empty weight file."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(tmp_path)


@pytest.fixture
def stage(model: str) -> CacheLookup:
    return opened(model=model)


def opened(**config: Any) -> CacheLookup:
    stage = CacheLookup(CacheLookup.Config(**config), Context())  # type: ignore[arg-type]
    stage.open()
    return stage


def prompt(id: str, num_tokens: int = 200, *, tail: int = 0, salt: str = "") -> Prompt:
    """Tokens 0, 1, 2, ... of which the last one is `tail`."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    tokens[-1] = tail
    return Prompt(id=id, tokens=tokens, sampling=Sampling(), cache_salt=salt)


def send(stage: CacheLookup, *prompts: Prompt) -> list[str]:
    return [out.id for out in stage.step(list(prompts))]


def tell(stage: CacheLookup, event: Event) -> list[str]:
    return [out.id for out in stage.observe(event) or ()]


def owners(prompt: Prompt) -> list[str]:
    assert prompt.prefix is not None
    return prompt.prefix.owners


def hashes(stage: CacheLookup, prompt: Prompt) -> list[bytes]:
    return stage._names(prompt)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_only_blocks_before_the_last_token_are_named(stage: CacheLookup, num_tokens: int, num_blocks: int) -> None:
    (out,) = stage.step([prompt("a", num_tokens)])
    assert out.prefix is not None and len(out.prefix.hashes) == num_blocks


def test_the_hint_says_who_holds_which_leading_block(stage: CacheLookup) -> None:
    first, second, _ = hashes(stage, prompt("a"))
    tell(stage, BlockStored(owner="prefill.0", hashes=[first]))
    tell(stage, BlockStored(owner="decode.0", hashes=[first, second]))
    (out,) = stage.step([prompt("a")])
    assert owners(out) == ["decode.0", "decode.0"]


@pytest.mark.parametrize("gone", ["removed", "cleared", "down"])
def test_what_an_owner_lost_is_not_hinted(stage: CacheLookup, gone: str) -> None:
    names = hashes(stage, prompt("a"))
    tell(stage, BlockStored(owner="prefill.0", hashes=names))
    event = {
        "removed": BlockRemoved(owner="prefill.0", hashes=names[1:]),
        "cleared": BlocksCleared(owner="prefill.0"),
        "down": WorkerDown(worker="prefill.0", generation=1),
    }[gone]
    tell(stage, event)
    (out,) = stage.step([prompt("a")])
    assert owners(out) == (["prefill.0"] if gone == "removed" else [])


def test_tenants_see_nothing_of_each_other(stage: CacheLookup) -> None:
    tell(stage, BlockStored(owner="prefill.0", hashes=hashes(stage, prompt("a", salt="alice"))))
    mine, theirs = stage.step([prompt("b", salt="alice"), prompt("c", salt="bob")])
    assert len(owners(mine)) == 3 and owners(theirs) == []


def test_quantized_weights_have_other_names(stage: CacheLookup, model: str) -> None:
    in_four, only_four, in_eight = (opened(model=model, weights=w) for w in ("int4", "int4-only", "int8"))
    names = [hashes(each, prompt("a")) for each in (stage, in_four, in_eight)]
    assert len({tuple(name) for name in names}) == 3
    assert hashes(only_four, prompt("a")) == names[1], "the same numbers, whether a copy is kept or not"


def test_other_dtypes_and_models_have_other_names(stage: CacheLookup, model: str) -> None:
    in_half = opened(model=model, dtype="bfloat16")
    assert not set(hashes(stage, prompt("a"))) & set(hashes(in_half, prompt("a")))
    assert hashes(opened(model=model, dtype="float32"), prompt("a")) == hashes(stage, prompt("a"))


def test_followers_go_on_with_a_hint_once_the_prefix_is_stored(stage: CacheLookup) -> None:
    prompts = [prompt(str(i), tail=i) for i in range(4)]
    assert send(stage, *prompts) == ["0"]
    names = hashes(stage, prompts[0])
    assert tell(stage, BlockStored(owner="prefill.0", hashes=names[:2])) == []
    assert tell(stage, BlockStored(owner="prefill.0", hashes=names[2:])) == ["1", "2", "3"]
    assert [owners(p) for p in prompts[1:]] == [["prefill.0"] * 3] * 3


def test_different_tenants_do_not_wait_for_each_other(stage: CacheLookup) -> None:
    assert send(stage, prompt("a", salt="alice"), prompt("b", salt="bob")) == ["a", "b"]


@pytest.mark.parametrize("end", [Failure(id="0"), Cancel(ids=["0"]), Ended(ids=["0"])])
def test_when_the_leader_stops_a_follower_takes_its_place_at_once(stage: CacheLookup, end: Event) -> None:
    send(stage, *[prompt(str(i)) for i in range(3)])
    assert tell(stage, end) == ["1"]
    assert tell(stage, BlockStored(owner="prefill.0", hashes=hashes(stage, prompt("a")))) == ["2"]


def test_cancel_lets_the_next_one_go_on_in_the_next_step(stage: CacheLookup) -> None:
    send(stage, *[prompt(str(i)) for i in range(3)])
    stage.cancel(["0"])
    assert stage.busy
    assert send(stage) == ["1"]
    assert not stage.busy


def test_what_is_cancelled_between_its_release_and_the_next_step_never_goes_on(stage: CacheLookup) -> None:
    send(stage, *[prompt(str(i)) for i in range(3)])
    stage.cancel(["0"])
    stage.cancel(["1"])
    assert send(stage) == ["2"]


def test_patience_ends_after_wait(model: str) -> None:
    stage = opened(model=model, wait="2s")
    send(stage, prompt("0"), prompt("1"))
    assert stage.ctx.pass_time(1.9) == []  # type: ignore[attr-defined]
    assert stage.ctx.pass_time(0.2) == ["1"]  # type: ignore[attr-defined]
    assert tell(stage, BlockStored(owner="prefill.0", hashes=hashes(stage, prompt("a")))) == []


def test_sharing_can_be_turned_off(model: str) -> None:
    assert send(opened(model=model, share_inflight=False), prompt("0"), prompt("1")) == ["0", "1"]


def test_the_contract_adds_prefix_and_names_the_model() -> None:
    contract = CacheLookup.Config(model="m", dtype="float32").contract()
    assert contract.adds == {"prefix"} and contract.model is not None
    assert (contract.model.model, contract.model.weights, contract.model.dtype) == ("m", False, "float32")
    assert ports(CacheLookup) == ((Port("prompts", Prompt),), (Port("prompt", Prompt),))
    assert CacheLookup.kind == "cache-lookup"


def test_an_unknown_tier_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="no cache tier 'tape'; known tiers: memory"):
        CacheLookup.Config(tiers={"tape": "1GiB"})
    assert CacheLookup.Config(tiers={"memory": "512MiB"}).tiers.memory == 2**29


def test_without_a_model_or_with_a_missing_one_the_error_names_the_stage() -> None:
    with pytest.raises(StageError, match="'lookup': no model is set"):
        opened()
    with pytest.raises(StageError, match=r"'lookup'.*nowhere"):
        opened(model="nowhere/at-all")


def test_block_events_are_published_to_a_real_subscriber_but_none_of_a_tenants(model: str) -> None:
    import msgspec
    import zmq

    stage = opened(model=model, events={"port": 0, "replay_port": 0})
    publisher = stage._publisher
    assert publisher is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.linger = 0
        for salt in ("alice", ""):
            (out,) = stage.step([prompt(salt, salt=salt)])
            tell(stage, BlockStored(owner="prefill.0", hashes=out.prefix.hashes))
        reader.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        reader.send_multipart((b"", bytes(8)))
        for _ in range(500):
            stage.ctx.pass_time(0.1)  # type: ignore[attr-defined]
            if reader.poll(10):
                break
        _, _number, payload = reader.recv_multipart()
        assert reader.recv_multipart()[2] == b""  # the end: nothing of alice
    stage.close()
    _, ((kind, hashes_, parent, tokens, size, *_),), rank = msgspec.msgpack.decode(payload)
    assert (kind, len(hashes_), parent, tokens, size, rank) == ("BlockStored", 3, None, list(range(192)), 64, 0)


def test_a_taken_events_port_is_told_with_the_stage(model: str) -> None:
    stage = opened(model=model, events={"port": 0, "replay_port": 0})
    assert stage._publisher is not None
    with pytest.raises(StageError, match=f"'lookup': events: can't listen on port {stage._publisher.port}"):
        opened(model=model, events={"port": stage._publisher.port, "replay_port": 0})
    stage.close()
