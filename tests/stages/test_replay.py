"""Prefixes without their window keys: what a prompt behind one answers, and that nothing cached is ever written."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_loop import Service, prompt

from flowinfer.cache.disk.offline import entries
from flowinfer.engine import hub
from flowinfer.message import Serving
from flowinfer.observe import metrics

VOCAB, CONTEXT = 96, 2048
SPARSE, HEAVY, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "all kinds": {"layer_types": [SLIDING, SPARSE, HEAVY], "sliding_window": 128},
    "two blocks": {"layer_types": [SPARSE, SPARSE], "sliding_window": 100},
    "small": {"layer_types": [SPARSE, HEAVY, SPARSE, SLIDING], "sliding_window": 20},
}


def save_random(folder: Path, **changes: Any) -> Path:
    """A small DeepSeek-V4 of random weights, none of them trivial."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32,
        "q_lora_rank": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "o_groups": 2, "o_lora_rank": 16,
        "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "num_hash_layers": 1, "bos_token_id": 1,
        "eos_token_id": 2, "max_position_embeddings": CONTEXT, "qk_rope_head_dim": 8, "initializer_range": 0.3,
        "num_hidden_layers": len(changes["layer_types"]),
    }  # fmt: skip
    DeepseekV4ForCausalLM(DeepseekV4Config(**sizes | changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(shape: str) -> Path:
        if shape not in made:
            made[shape] = save_random(tmp_path_factory.mktemp("v4"), **SHAPES[shape])
        return made[shape]

    return get


@pytest.fixture(autouse=True)
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it, however fast the small model computes."""
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


class Watched(Service):
    """A service that keeps the logits of each step and what cached blocks hold."""

    def __init__(
        self, model: Path, folder: Path | None, mode: str = "exact", num_blocks: int = 64, **more: Any
    ) -> None:
        disk = {"path": str(folder), "size": "64MiB", "segment": "1MiB", "spare": "0"}
        tiers = {"write": "all", "disk": disk} if folder else {}
        super().__init__(model, num_blocks=num_blocks, lookup={"tiers": tiers, "replay": mode}, **more)
        self.engine = self.decode.engine
        self.logits: list[torch.Tensor] = []
        self.seen: dict[tuple[int, bytes, bool], bytes] = {}
        forward = self.engine.forward

        def kept(*args: Any, **how: Any) -> Any:
            before = self.bytes_of_shared()
            logits = forward(*args, **how)
            if logits is not None:
                self.logits.append(logits.clone())
            after = self.bytes_of_shared()
            assert before == {key: after[key] for key in before}, "a step wrote over what is cached"
            return logits

        self.engine.forward = kept
        self.group.emit(Serving())

    def bytes_of_shared(self) -> dict[tuple[int, bytes], bytes]:
        """What names say: the entries of each cached block, and the state of whole ones."""
        parts, pool = self.engine.layout.parts, self.pool
        found = {}
        for block, name in pool._name.items():
            end = parts["entries"].stop if pool.is_partial(name) else parts["state"].stop
            found[block, name] = self.engine.kv[block].view(-1)[:end].view(torch.uint8).numpy().tobytes()
        return found

    def ask(self, tokens: list[int], max_tokens: int = 6, **how: Any) -> tuple[list[int], torch.Tensor]:
        """The answer and the logits of each of its steps."""
        id, self.logits = f"r{random.random()}", []
        self.send(prompt(id, tokens, max_tokens, **how))
        answer = self.finish([id])[id]
        self.end = self.client.ended[id]
        return answer, torch.cat(self.logits)

    def stop(self) -> None:
        """Ends, once all is written; by then nobody holds a block."""
        deadline = time.monotonic() + 20
        while self.pool.num_free < self.pool.num_blocks and time.monotonic() < deadline:
            self.woken.wait(0.01)
            self.woken.clear()
            self.turn()
        self.group.close()
        assert self.pool.num_free == self.pool.num_blocks

    def replayed(self) -> float:
        samples = [value for name, _, value in metrics.snapshot() if "prefix_replay_tokens" in name]
        return sum(samples)


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def cold(model: Path, tokens: list[int], max_tokens: int = 6) -> tuple[list[int], torch.Tensor]:
    return Watched(model, None).ask(tokens, max_tokens)


FIRST = 9  # blocks of the prompt that is on disk


@pytest.fixture(scope="module")
def stored(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path, str], Path]:
    """A copy of what a service left on disk that had answered one prompt of some more than nine blocks."""
    made: dict[tuple[str, bool], Path] = {}

    def get(shape: str, copy: Path, mode: str = "exact") -> Path:
        key = (shape, mode == "bounded")
        if key not in made:
            made[key] = tmp_path_factory.mktemp("kv")
            running = Watched(models(shape), made[key], mode)
            running.ask(first_tokens(models(shape)), 2)
            running.stop()
        return shutil.copytree(made[key], copy / f"{shape} {mode} {len(list(copy.iterdir()))}")

    return get


def block_tokens(model: Path) -> int:
    return hub.describe(model).layout("float32").block_tokens


def first_tokens(model: Path) -> list[int]:
    return some_tokens(1, FIRST * block_tokens(model) + 5)


@pytest.mark.parametrize(
    ("shape", "at"), [("all kinds", 1), ("all kinds", 4), ("all kinds", 9), ("two blocks", 6), ("small", 3)]
)
def test_exact_and_off_answer_as_a_cold_run_behind_a_hit_at_any_block(
    models: Callable[[str], Path], stored: Callable[..., Path], tmp_path: Path, shape: str, at: int
) -> None:
    model = models(shape)
    size, tokens = block_tokens(model), first_tokens(model)
    if at < FIRST:
        tokens = [*tokens[: at * size + 3], *some_tokens(2, 40)]
    wanted, logits = cold(model, tokens)
    for mode in ("exact", "off"):
        again = Watched(model, stored(shape, tmp_path), mode)
        rule, before = again.engine.prefixes.rule, again.replayed()
        answer, found = again.ask(tokens)
        assert answer == wanted
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
        begin = at if at == FIRST else at - rule.blocks if mode == "exact" and at > rule.blocks else 0
        assert again.end.cached_tokens == begin * size
        assert again.replayed() - before == (rule.blocks * size if 0 < begin < FIRST else 0)
        again.stop()
