"""prefill, kv-transfer, moe-decode and spec-verify in one group on a small random model, with a client at both ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowinfer.engine.layout import KVLayout
from flowinfer.graph.kernel_set import kernel_set
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Cancel, Ended, Event, Failure, Message, Opening, Prompt, Sampling, TokenLogprob, Tokens
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.group import Group, Host
from flowinfer.runtime.loading import load_class
from flowinfer.stage import Arena, Stage

DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")  # cuda:0 runs all of this on a GPU


def save_random_llama(folder: Path, vocab_size: int, context: int) -> Any:
    """A small Llama of random weights; id 1 begins a text, id 2 ends it. Returns it, as transformers has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def save_random_v4(folder: Path, vocab_size: int, context: int, **changes: Any) -> Any:
    """A small DeepSeek-V4 with all kinds of layers. Every parameter is random, or some would never show in logits.

    changes: fields of its config that are to be others.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 32,
        "q_lora_rank": 16,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,  # few would often give two entries a score of exactly zero
        "index_head_dim": 16,
        "index_topk": 16,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "num_hash_layers": 1,
        "max_position_embeddings": context,
        "qk_rope_head_dim": 8,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    sizes["num_hidden_layers"] = len(sizes["layer_types"])
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or name.endswith("scale") else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 else 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(vocab_size)]))
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


class Client(Stage):
    """Sends prompts and keeps the tokens that come back."""

    kind = "api"
    listens = (Failure,)

    def __init__(self, config: Any, ctx: Any) -> None:
        super().__init__(config, ctx)
        self.outbox: list[Prompt] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}
        self.opened: dict[str, Opening] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.outbox)

    def step(self, tokens: list[Tokens]) -> Iterable[Prompt]:
        for batch in tokens:
            ends = np.cumsum(batch.counts)
            self.opened |= {opening.id: opening for opening in batch.opened}
            for i, id in enumerate(batch.ids):
                new = batch.tokens[ends[i] - batch.counts[i] : ends[i]].tolist()
                self.tokens.setdefault(id, []).extend(new)
                self.logprobs.setdefault(id, []).extend(batch.logprobs.get(i, []))
                if i in batch.finished:
                    assert self.ended.get(id, "cancelled") == "cancelled", "a request ends once"
                    self.ended.setdefault(id, batch.finished[i])  # a cancel may cross the end
                    self.ctx.send(Ended(ids=[id]))
        prompts, self.outbox = self.outbox, []
        return prompts

    def observe(self, event: Event) -> Iterable[Message] | None:
        assert isinstance(event, Failure)
        self.ended[event.id] = event
        return None


EDGES = (
    ("api", "lookup", "Prompt", "prompts"),
    ("lookup", "prefill", "Prompt", "prompts"),
    ("prefill", "transfer", "Sequence", "sequences"),
    ("transfer", "decode", "Sequence", "sequences"),
    ("decode", "verify", "Logits", "logits"),
    ("verify", "decode", "Proposal", "proposals"),
    ("verify", "api", "Tokens", "tokens"),
)


class Service:
    """The five stages in one group over `num_blocks` blocks."""

    def __init__(
        self,
        model: Path | str,
        *,
        num_blocks: int,
        draft: str = "none",
        lookup: dict[str, Any] | None = None,
        verify: dict[str, Any] | None = None,
        invariant: bool = False,
        **decode: Any,
    ) -> None:
        named = {"model": str(model), "dtype": "float32"}
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "api": ("api", {}),
            "lookup": ("cache-lookup", {**named, **(lookup or {})}),
            "prefill": ("prefill", {**named, "token_budget": 96}),
            "transfer": ("kv-transfer", named),
            "decode": ("moe-decode", {**named, "max_batch": 8, **decode}),
            "verify": ("spec-verify", {"draft": draft, **(verify or {})}),
        }
        stages = {n: StagePlan(name=n, kind=k, config=c, worker="front") for n, (k, c) in kinds.items()}
        edges = tuple(
            EdgePlan(name=f"{a} -> {b}", source=a, target=b, message=m, port=p, fused=True, back=m == "Proposal")
            for a, b, m, p in EDGES
        )
        workers = {"front": WorkerPlan(name="front", stages=tuple(stages))}
        kernels = kernel_set(DEVICE.partition(":")[0]) if invariant else ""
        plan = Plan(name="t", digest="", file="", stages=stages, edges=edges, workers=workers, kernels=kernels)

        def arena(layout: KVLayout) -> Arena:
            return Arena(memoryview(bytearray(num_blocks * layout.block_bytes)), num_blocks, 0, num_blocks)

        self.group = Group(
            plan,
            list(stages.values()),
            Host(arena=arena, device=DEVICE),
            lambda stage: Client if stage.kind == "api" else load_class(stage.kind),
            name="front.0",
            generation=1,
            clock=SystemClock(),
        )
        self.woken = threading.Event()
        self.group.wake = self.woken.set  # type: ignore[method-assign]
        self.group.open()
        self.client: Client = self.group.by_name["api"].stage  # type: ignore[assignment]
        self.decode: Any = self.group.by_name["decode"].stage
        self.pool = self.decode.engine.pool

    def send(self, *prompts: Prompt) -> None:
        self.client.outbox.extend(prompts)

    def cancel(self, *ids: str) -> None:
        for id in ids:
            self.client.ended.setdefault(id, "cancelled")
        self.group.emit(Cancel(ids=list(ids)))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.group.turn()

    def finish(self, ids: Iterable[str], seconds: float = 60.0) -> dict[str, list[int]]:
        """Tokens of these requests once all have ended; waits only for background work and timers."""
        ids, deadline = list(ids), time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(id in self.client.ended for id in ids):
                self.turn(2)
                return {id: self.client.tokens.get(id, []) for id in ids}
            if self.group.wait_s() != 0:
                self.woken.wait(0.01)
            self.woken.clear()
            self.group.turn()
        raise AssertionError(f"not ended: {[id for id in ids if id not in self.client.ended]}")


def prompt(id: str, tokens: Iterable[int], max_tokens: int = 24, **sampling: Any) -> Prompt:
    options = {"temperature": 0.0, "ignore_eos": True, "seed": 7, **sampling}
    return Prompt(id=id, tokens=np.array(list(tokens), np.int32), sampling=Sampling(max_tokens=max_tokens, **options))
