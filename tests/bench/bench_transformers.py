"""Our model against transformers' continuous batching: same weights, prompts, dtype and threads, by turns in one run.

Both answer the same token ids greedily to a fixed length; a stream counts its prompt's time too. Ours is the bare model
under a plain loop, so this is what the engine may lose to scheduling before it falls behind.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.step import StepInput

Prompts = list[list[int]]


def ours(model: Any, prompts: Prompts, new_tokens: int) -> list[list[int]]:
    """Each prompt in one step, then all together."""
    config, batch = model.config, len(prompts)
    longest = max(map(len, prompts)) + new_tokens
    blocks = -(-longest // 64)
    kv = torch.zeros(batch * blocks, config.num_layers, 2, 64, config.num_kv_heads, config.head_dim, dtype=model.dtype)
    tables = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    last = torch.cat([_prefill(model, prompt, tables[i : i + 1], kv) for i, prompt in enumerate(prompts)])
    answers = [last]
    for _ in range(new_tokens - 1):
        lengths = lengths + 1
        positions = torch.from_numpy(lengths.astype(np.int64)) - 1
        starts = np.arange(batch + 1, dtype=np.int32)
        logits = model.forward(StepInput(last, positions, starts, lengths, tables, torch.arange(batch)), kv)
        assert logits is not None
        last = logits.argmax(-1)
        answers.append(last)
    return torch.stack(answers, 1).tolist()


def _prefill(model: Model, prompt: list[int], table: np.ndarray, kv: torch.Tensor) -> torch.Tensor:
    count = len(prompt)
    starts, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
    step = StepInput(torch.tensor(prompt), torch.arange(count), starts, lengths, table, torch.tensor([count - 1]))
    logits = model.forward(step, kv)
    assert logits is not None
    return logits.argmax(-1)


def theirs(model: Any, prompts: Prompts, new_tokens: int) -> list[list[int]]:
    """transformers' generate_batch with its own scheduler and paged cache."""
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Its default takes 60 % of the memory of the machine.
    outputs = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=160),
        persistent_manager=True,
    )
    by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def main() -> None:
    """Prints tokens a second of both, and their ratio, for one and for sixteen streams."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    path = hub.resolve("smollm2-135m")
    mine = load_model(path, dtype="bfloat16")
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    table = Table("streams", "flowinfer tok/s", "transformers tok/s", "ratio", "same first tokens")
    for streams in (1, 16):
        rng = np.random.default_rng(streams)
        prompts = [rng.integers(100, 40_000, 128 + 2 * i).tolist() for i in range(streams)]
        table.add_row(str(streams), *compare(mine, other, prompts, args.new_tokens, args.rounds))
        other.destroy_cached_continuous_batching_manager()  # it is sized for the prompts that it first met
    Console().print(table)


def compare(mine: Model, other: Any, prompts: Prompts, new_tokens: int, rounds: int) -> list[str]:
    """Medians over rounds in which both take their turn; the first round doesn't count."""
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        for name, run, model in (("ours", ours, mine), ("theirs", theirs, other)):
            start = time.perf_counter()
            answers[name] = run(model, prompts, new_tokens)
            if turn:
                speeds[name].append(len(prompts) * new_tokens / (time.perf_counter() - start))
    same = sum(a[0] == b[0] for a, b in zip(answers["ours"], answers["theirs"], strict=True))
    left, right = (statistics.median(speeds[name]) for name in ("ours", "theirs"))
    return [f"{left:.0f}", f"{right:.0f}", f"{left / right:.2f}", f"{same}/{len(prompts)}"]


if __name__ == "__main__":
    main()
