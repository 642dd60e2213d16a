"""Tokens a second over HTTP against transformers' continuous batching, one stream and sixteen, in one interleaved run.

Run: python tests/bench/bench_serving.py [--rounds 3]. Same weights in bf16, same prompts, greedy, two threads each; the
one that isn't measured is idle. FlowInfer streams over HTTP; transformers runs in its process without HTTP.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from harness import Service, machine, percentile, prompt_ids, service

from flowinfer.engine import hub

HEAD = "streams  FlowInfer tok/s  transformers tok/s  ratio  TTFT ms  ITL p99 ms"
LOADS = {1: (128, 128), 16: (256, 64)}  # streams: prompt tokens, new tokens


class Peer:
    """transformers with continuous batching, in this process."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(2)
        self.model = AutoModelForCausalLM.from_pretrained(hub.resolve(model), dtype=torch.bfloat16)
        self.model.eval()
        self.options = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=160)}
        self.generation = GenerationConfig

    def run(self, prompts: list[list[int]], new: int) -> float:
        """Seconds for all; greedy and to full length."""
        config = self.generation(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate_batch(inputs=prompts, generation_config=config, **self.options)
        seconds = time.perf_counter() - began
        assert sum(len(one.generated_tokens) for one in out.values()) == len(prompts) * new, "all tokens were made"
        return seconds


def ours(running: Service, prompts: list[list[int]], new: int) -> tuple[float, list[float], list[float]]:
    """Seconds for all, times to first token, gaps."""
    began = time.perf_counter()
    streams = running.all([(prompt, new) for prompt in prompts])
    seconds = time.perf_counter() - began
    assert all(stream.usage["completion_tokens"] == new for stream in streams), "all tokens were made"
    return seconds, [s.ttft for s in streams], [gap for s in streams for gap in s.gaps]


def main() -> None:
    """Prints one line a load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pipeline", default="colocated.yaml")
    args = parser.parse_args()
    peer = Peer("smollm2-135m")
    print(machine())
    with service(args.pipeline, "workers.engine.threads=2") as running:
        print(f"{args.pipeline} ready after {running.started_s:.1f} s")
        print(HEAD)
        for streams, (length, new) in LOADS.items():
            rows = []
            for round in range(args.rounds + 1):  # the first one warms both up
                prompts = [prompt_ids(length, seed=1000 * streams + 100 * round + i) for i in range(streams)]
                mine, first, gaps = ours(running, prompts, new)
                theirs = peer.run(prompts, new)
                rows.append(
                    (streams * new / mine, streams * new / theirs, statistics.median(first), percentile(gaps, 0.99))
                )
            a, b, first_s, gap_s = (statistics.median(column) for column in zip(*rows[1:], strict=True))
            print(f"{streams:>7} {a:>16.1f} {b:>19.1f} {a / b:>6.2f} {first_s * 1e3:>8.0f} {gap_s * 1e3:>11.1f}")


if __name__ == "__main__":
    main()
