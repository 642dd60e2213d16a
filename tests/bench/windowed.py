"""Small random models with windows, and a service over them that watches what is cached, for tests and benchmarks."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from decode_loop import Service, prompt, save_random_v4

from flowinfer.engine import hub
from flowinfer.message import Serving
from flowinfer.observe import metrics

VOCAB = 96
SPARSE, HEAVY, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
SHAPES = {
    "all kinds": ([SLIDING, SPARSE, HEAVY], 128),
    "two blocks": ([SPARSE, SPARSE], 100),
    "small": ([SPARSE, HEAVY, SPARSE, SLIDING], 20),
}
FIRST = 9  # blocks of the prompt that is on disk


def save_windowed(folder: Path, layer_types: list[str], window: int, context: int = 2048) -> Path:
    """A small DeepSeek-V4 of random weights with these layers; returns the folder."""
    save_random_v4(folder, VOCAB, context, layer_types=layer_types, sliding_window=window)
    return folder


def some_tokens(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    """Random ones, the same for each seed."""
    return random.Random(seed).choices(range(3, vocab), k=count)


class Watched(Service):
    """Keeps the logits of each decode step, and checks at each turn that what names say of cached blocks stays.

    folder: of its disk tier; None: it has none.  mode: of replay.  seed: of what lies in the memory at first.
    tiers: others, or more settings of them.
    """

    def __init__(
        self,
        model: Path,
        folder: Path | None,
        mode: str = "exact",
        num_blocks: int = 64,
        seed: int = 0,
        tiers: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        disk = {"disk": {"path": str(folder), "size": "256MiB", "segment": "1MiB", "spare": "0"}} if folder else {}
        lookup = {"tiers": {"write": "all", **disk, **(tiers or {})}, "replay": mode}
        super().__init__(model, num_blocks=num_blocks, lookup=lookup, **more)
        self.engine = self.decode.engine
        self.logits: list[torch.Tensor] = []
        self._before: dict[tuple[int, bytes], bytes] = {}
        generator = torch.Generator().manual_seed(seed)
        self.engine.kv.copy_(torch.randn(self.engine.kv.shape, generator=generator) * 9)  # of earlier tenants
        forward = self.engine.forward

        def kept(*args: Any, **how: Any) -> Any:
            logits = forward(*args, **how)
            if logits is not None:
                self.logits.append(logits.clone())
            return logits

        prefill, turn = self.group.by_name["prefill"].stage, self.group.turn

        def checked(*args: Any) -> Any:
            computes = prefill.scheduler.has_work or prefill.restoring  # type: ignore[attr-defined]
            turned = turn(*args)
            if computes:
                self.check_cached()
            return turned

        self.engine.forward, self.group.turn = kept, checked  # type: ignore[method-assign]
        self.group.emit(Serving())

    def check_cached(self) -> None:
        """No byte of a cached block is written, not even of what a partial one lacks."""
        now = {
            item: self.engine.kv[item[0]].view(torch.uint8).cpu().numpy().tobytes() for item in self.pool._name.items()
        }
        changed = [key for key, data in self._before.items() if now.get(key, data) != data]
        assert not changed, f"cached blocks were written: {changed}"
        self._before = now

    def ask(self, tokens: list[int], max_tokens: int = 6, **how: Any) -> tuple[list[int], torch.Tensor]:
        """The answer and the logits of each of its steps."""
        id, self.logits = f"r{random.random()}", []
        self.send(prompt(id, tokens, max_tokens, **how))
        answer = self.finish([id])[id]
        self.end = self.client.ended[id]
        self.check_cached()
        return answer, torch.cat(self.logits)

    def settle(self) -> None:
        """Turns until all that is to be stored is; by then nobody holds a block."""
        deadline = time.monotonic() + 20
        while self.pool.num_free < self.pool.num_blocks and time.monotonic() < deadline:
            self.woken.wait(0.01)
            self.woken.clear()
            self.turn()
        assert self.pool.num_free == self.pool.num_blocks

    def stop(self) -> None:
        """Ends, as a service does that is told to."""
        self.settle()
        self.group.close()


def counted(name: str) -> float:
    """The sum of a counter over its labels, in this process so far."""
    return sum(value for metric, _, value in metrics.snapshot() if metric.endswith(name))


def block_tokens(model: Path) -> int:
    return hub.describe(model).layout("float32").block_tokens


def first_tokens(model: Path) -> list[int]:
    return some_tokens(1, FIRST * block_tokens(model) + 5)


def behind(model: Path, at: int, seed: int = 2, count: int = 40) -> list[int]:
    """A prompt that shares `at` blocks, and some tokens, with the one on disk."""
    return [*first_tokens(model)[: at * block_tokens(model) + 3], *some_tokens(seed, count)]


def cold(model: Path, tokens: list[int], max_tokens: int = 6) -> tuple[list[int], torch.Tensor]:
    return Watched(model, None).ask(tokens, max_tokens)


def same(found: tuple[list[int], torch.Tensor], wanted: tuple[list[int], torch.Tensor]) -> None:
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)
