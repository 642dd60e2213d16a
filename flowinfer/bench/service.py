"""The engine with the stages that drive it, in one loop: prompts go in, tokens come out on the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowinfer.engine.engine import Engine
from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError
from flowinfer.graph.kernel_set import kernel_set
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Ended, Event, Failure, Finish, Message, Prompt, Sampling, Tokens
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.group import Group, Host
from flowinfer.runtime.loading import load_class
from flowinfer.stage import Arena, Stage

_EDGES = (
    ("api", "prefill", "Prompt", "prompts"),
    ("prefill", "transfer", "Sequence", "sequences"),
    ("transfer", "decode", "Sequence", "sequences"),
    ("decode", "verify", "Logits", "logits"),
    ("verify", "decode", "Proposal", "proposals"),
    ("verify", "api", "Tokens", "tokens"),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of one step at the client. at: seconds of time.perf_counter.

    waited_s: what the loop has spent until then on waiting for the device.  num_ended: sequences that it ended.
    """

    at: float
    num_sequences: int
    waited_s: float
    num_tokens: int
    num_ended: int


class Client(Stage):
    """Sends prompts and notes when the tokens of each step come.

    outputs, times: set to dicts, they take the tokens by id, and when each of them came (seconds of perf_counter).
    """

    kind = "api"
    listens = (Failure,)

    def __init__(self, config: Any, ctx: Any) -> None:
        super().__init__(config, ctx)
        self.outbox: list[Prompt] = []
        self.arrivals: list[Arrival] = []
        self.ended: dict[str, Finish] = {}
        self.outputs: dict[str, list[int]] | None = None
        self.times: dict[str, list[float]] | None = None
        self.failed = ""
        self.waited_s: Callable[[], float] = lambda: 0.0

    @property
    def busy(self) -> bool:
        """While there are prompts to send."""
        return bool(self.outbox)

    def step(self, tokens: list[Tokens]) -> Iterable[Prompt]:
        """Notes arrivals and ends; sends what waits."""
        for batch in tokens:
            done = {batch.ids[i]: finish for i, finish in batch.finished.items()}
            arrival = Arrival(time.perf_counter(), len(batch.ids), self.waited_s(), len(batch.tokens), len(done))
            self.arrivals.append(arrival)
            if self.outputs is not None:
                self._keep(batch, self.outputs)
            if self.times is not None:
                for id, count in zip(batch.ids, batch.counts.tolist(), strict=True):
                    self.times.setdefault(id, []).extend([arrival.at] * count)
            self.ended |= done
            if done:
                self.ctx.send(Ended(ids=list(done)))
        prompts, self.outbox = self.outbox, []
        return prompts

    def _keep(self, batch: Tokens, outputs: dict[str, list[int]]) -> None:
        ends = np.cumsum(batch.counts)
        for id, start, end in zip(batch.ids, ends - batch.counts, ends, strict=True):
            outputs.setdefault(id, []).extend(batch.tokens[start:end].tolist())

    def observe(self, event: Event) -> Iterable[Message] | None:
        """Remembers the first failure: a benchmark whose request failed has measured nothing."""
        assert isinstance(event, Failure)
        self.failed = self.failed or f"{event.id}: {event.message}"
        return None


class EngineService:
    """prefill, kv-transfer, moe-decode and spec-verify on one device over num_blocks blocks of KV."""

    def __init__(
        self,
        model: str,
        *,
        device: str,
        dtype: str,
        num_blocks: int,
        max_batch: int,
        max_tokens: int,
        chunk: int,
        verify: dict[str, Any] | None = None,
        batch_invariant: bool = False,
        weights: str = "checkpoint",
        kv_dtype: str = "auto",
    ) -> None:
        """verify: settings of spec-verify, which else drafts nothing."""
        named = {"model": model, "dtype": dtype, "weights": weights, "kv_dtype": kv_dtype}
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "api": ("api", {}),
            "prefill": ("prefill", {**named, "token_budget": chunk, "max_prompts": max(64, max_batch)}),
            "transfer": ("kv-transfer", named),
            "decode": ("moe-decode", {**named, "max_batch": max_batch, "max_tokens": max_tokens}),
            "verify": ("spec-verify", verify or {"draft": "none"}),
        }
        stages = {n: StagePlan(name=n, kind=k, config=c, worker="front") for n, (k, c) in kinds.items()}
        edges = tuple(
            EdgePlan(name=f"{a} -> {b}", source=a, target=b, message=m, port=p, fused=True, back=m == "Proposal")
            for a, b, m, p in _EDGES
        )
        plan = Plan(
            name="bench", digest="", file="", stages=stages, edges=edges,
            workers={"front": WorkerPlan(name="front", stages=tuple(stages))},
            kernels=kernel_set(device.partition(":")[0]) if batch_invariant else "",
        )  # fmt: skip
        self._num_sent = 0
        self.sent: list[str] = []

        def arena(layout: KVLayout) -> Arena:
            size = 0 if device.startswith("cuda") else num_blocks * layout.block_bytes
            return Arena(memoryview(bytearray(size)), num_blocks, 0, num_blocks)

        import torch

        host = Host(arena=arena, device=device, threads=torch.get_num_threads())
        self.group = Group(
            plan, list(stages.values()), host, lambda s: Client if s.kind == "api" else load_class(s.kind),
            name="front.0", generation=1, clock=SystemClock(),
        )  # fmt: skip
        self.group.open()
        gc.collect()
        gc.freeze()  # as a worker does: a collection over all that torch loaded takes longer than a step
        self.client: Client = self.group.by_name["api"].stage  # type: ignore[assignment]
        decode: Any = self.group.by_name["decode"].stage
        self.decode = decode
        self.engine: Engine = decode.engine
        self.client.waited_s = lambda: self.waited_s

    @property
    def waited_s(self) -> float:
        """Seconds that the loop has spent waiting for the device, or computing in its place, so far."""
        overlap = self.decode.overlap
        return self.engine.busy_s + (float(overlap.waited_s) if overlap is not None else 0.0)

    def answer(
        self,
        prompts: Iterable[np.ndarray[Any, np.dtype[np.int32]]],
        max_tokens: int,
        watch: Callable[[], None] | None = None,
        **sampling: Any,
    ) -> list[Arrival]:
        """Sends requests, runs the loop until all have ended, and returns when the tokens of each step came.

        They are greedy and as long as they may be, but for what `sampling` says. watch is called after each turn of
        the loop. What became of each is in client.ended, by its id; `sent` are the last ids.
        """
        self.client.arrivals, self.client.ended = [], {}
        self.sent = []
        for tokens in prompts:
            self._num_sent += 1
            self.sent.append(f"r{self._num_sent}")
            options = {"temperature": 0.0, "ignore_eos": True, **sampling}
            request = Sampling(max_tokens=max_tokens, **options)
            self.client.outbox.append(Prompt(id=self.sent[-1], tokens=tokens, sampling=request))
        while not self.client.ended.keys() >= set(self.sent):
            self.group.turn()
            if watch is not None:
                watch()
            if self.client.failed:
                raise FlowInferError(f"a request failed: {self.client.failed}")
        return self.client.arrivals

    def close(self) -> None:
        """Ends the stages."""
        self.group.close()
