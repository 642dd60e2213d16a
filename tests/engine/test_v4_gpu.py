"""flowinfer-mini on a GPU: the answers of the CPU, and with batch_invariant the same bytes in any company."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowinfer.bench.service import EngineService
from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.step import StepInput
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODEL = "flowinfer-mini"
LENGTHS = (7, 60, 131, 260, 700)


def prompts() -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Each says the same twice, so that look-ups find drafts."""
    made = np.random.default_rng(3)
    return [np.tile(made.integers(10, 8_000, length // 2 + 1), 2)[:length].astype(np.int32) for length in LENGTHS]


def answers(device: str, *, together: bool, chunk: int = 512, **options: Any) -> list[list[int]]:
    """24 greedy tokens behind each prompt, in one batch or one after the other."""
    service = EngineService(
        MODEL, device=device, dtype="float32", num_blocks=64, max_batch=8, max_tokens=1_024, chunk=chunk, **options
    )
    assert (service.decode.overlap is not None) == device.startswith("cuda"), "decode steps are graphs on a card"
    found = []
    for group in [prompts()] if together else [[one] for one in prompts()]:
        service.client.outputs = {}
        service.answer(group, max_tokens=24)
        found += [service.client.outputs[id] for id in service.sent]
    service.close()
    return found


def test_its_answers_are_those_of_the_cpu() -> None:
    assert answers("cuda:0", together=True) == answers("cpu", together=False)


def test_drafts_change_no_answer() -> None:
    drafting = {"draft": "ngram", "tokens": 3, "schedule": "fixed", "ngram_min": 1}
    assert answers("cuda:0", together=True, verify=drafting) == answers("cuda:0", together=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_of_logits_has_the_same_bytes_in_every_kind_of_step(dtype: str) -> None:
    model: Any = load_model(hub.resolve(MODEL), dtype=dtype, device="cuda:0", batch_invariant=True)
    layout = hub.describe(hub.resolve(MODEL)).layout(dtype)
    tables = np.random.default_rng(0).permutation(32).astype(np.int32).reshape(4, 8)
    tokens = np.random.default_rng(1).integers(10, 8_000, (4, 740)).astype(np.int64)
    whole_kv, kv = (
        torch.full((32, *layout.block_shape), 5.0, dtype=model.dtype, device="cuda:0") for _ in range(2)
    )  # fmt: skip

    def run(kv: Tensor, *parts: tuple[int, int, int]) -> Tensor:
        """Rows of logits of (sequence, start, count) in one step."""
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in parts])
        flat = np.concatenate([tokens[s, start : start + count] for s, start, count in parts])
        step = StepInput(
            tokens=torch.from_numpy(flat).cuda(),
            positions=torch.from_numpy(positions).cuda(),
            query_starts=np.cumsum([0, *(count for _, _, count in parts)]).astype(np.int32),
            kv_lens=np.array([start + count for _, start, count in parts], np.int32),
            block_tables=tables[[s for s, _, _ in parts]],
            logit_rows=torch.arange(len(flat), device="cuda"),
        )
        with torch.inference_mode():
            logits: Tensor = model.forward(step, kv)
        return logits

    whole = [run(whole_kv, (s, 0, 740)) for s in range(4)]
    cuts = (0, 1, 130, 131, 133, 511, 720)
    pieces: list[list[Tensor]] = [[] for _ in range(4)]
    for start, end in pairwise(cuts):
        count = end - start
        rows = run(kv, *((s, start, count) for s in range(4)))
        for s in range(4):
            pieces[s].append(rows[s * count : (s + 1) * count])
    slots = torch.tensor([2, 0, -1, 3, 1], dtype=torch.int32, device="cuda")
    scratch = Scratch.make(5, model.heads, model.device)
    for at in range(720, 740):
        lengths = torch.full((4,), at + 1, dtype=torch.int32, device="cuda")
        last = torch.from_numpy(tokens[:, at].astype(np.int32)).cuda()
        with torch.inference_mode():
            batch = DecodeBatch(slots, lengths, torch.from_numpy(tables).cuda())
            rows = model.decode(last, batch, kv, scratch)
        for row, s in ((0, 2), (1, 0), (3, 3), (4, 1)):
            pieces[s].append(rows[row : row + 1].float())
    for s in range(4):
        assert torch.equal(torch.cat(pieces[s]), whole[s])


def test_with_batch_invariant_a_batch_and_chunks_change_no_answer() -> None:
    alone = answers("cuda:0", together=False, batch_invariant=True)
    assert answers("cuda:0", together=True, chunk=96, batch_invariant=True) == alone
