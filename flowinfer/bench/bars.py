"""What vLLM 0.25.1 reached on one H200: CUDA graphs, FlashAttention 3, bf16, random weights, greedy, no prefix cache.

Measured on 2026-11-29 on a card that read 4.15 TB/s and multiplied bf16 at 770 TFLOP/s. Decode: milliseconds a step
with 1,024 tokens of context, 512 at batch 512. Prefill: tokens a second over 8 prompts of 8,192 tokens.
"""

from __future__ import annotations

SOURCE = "vLLM 0.25.1, one H200, 2026-11-29"
DECODE_MS: dict[str, dict[int, float]] = {
    "smollm2-135m": {1: 1.91, 8: 2.12, 32: 2.48, 128: 5.64, 256: 9.60, 512: 11.17},
    "qwen3-8b": {1: 5.28, 8: 5.77, 32: 6.78, 128: 11.75, 256: 20.17, 512: 28.21},
    "qwen3-30b-a3b": {1: 4.19, 8: 9.11, 32: 16.51, 128: 21.40, 256: 26.76, 512: 30.77},
}
PREFILL_TOKENS_S: dict[str, float] = {"smollm2-135m": 399e3, "qwen3-8b": 37.5e3, "qwen3-30b-a3b": 52.4e3}
CONTEXT = {512: 512}  # by batch; else 1,024
DEFAULT_CONTEXT = 1024
BATCHES = (1, 8, 32, 128, 256, 512)
PREFILL = (8, 8192)  # prompts, tokens of each
