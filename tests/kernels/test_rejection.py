"""Rejection sampling as a kernel gives what the sampler's yardstick gives."""

from __future__ import annotations

import os

import pytest
import torch

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.rejection import reject, reject_reference

pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowinfer.kernels.rejection import triton

    monkeypatch.setattr(triton, "BLOCK", 16)


def rows(batch: int, drafts: int, vocab: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Target and drafter near each other, with tokens that one of them never gives."""
    made = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, drafts + 1, vocab, generator=made)
    q_logits = logits[:, :drafts] + torch.randn(batch, drafts, vocab, generator=made)
    p, q = logits.masked_fill(logits < -1.5, -torch.inf), q_logits.masked_fill(q_logits < -1.5, -torch.inf)
    p, q = p.softmax(-1).to(dtype), q.softmax(-1).to(dtype)
    if drafts:
        q[0] = p[0, :drafts]  # nothing is left of p where q is p
        tokens = torch.multinomial(q.flatten(0, 1).float(), 1, generator=made).view(batch, drafts)
    else:
        tokens = torch.zeros(batch, 0, dtype=torch.int64)
    return [p, q, tokens, torch.rand(batch, drafts + 1, generator=made, dtype=torch.float64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("drafts", "vocab"), [(0, 9), (1, 50), (5, 50), (3, 16)])
def test_the_kernel_accepts_and_draws_as_the_yardstick(drafts: int, vocab: int, dtype: torch.dtype) -> None:
    held = set()
    for seed in range(3):
        given = rows(6, drafts, vocab, seed, dtype)
        counts = torch.randint(0, drafts + 1, (6,), generator=torch.Generator().manual_seed(seed))
        for extra in ((), (counts,)):
            want = reject_reference(*given, *extra)
            got = reject(*(x.to(DEVICE) for x in (*given, *extra)))
            assert [x.tolist() for x in got] == [x.tolist() for x in want]
            held |= set(want[0].tolist())
    assert len(held) == 1 + drafts or drafts > 3


def test_equal_distributions_whose_draft_fails_draw_from_the_target() -> None:
    """A uniform of 1 fails every draft, though nothing of p is left beside q."""
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    given = [p, p[:, :1].contiguous(), torch.tensor([[1]]), torch.tensor([[1.0, 0.9]])]
    accepted, tokens = reject(*(x.to(DEVICE) for x in given))
    assert (accepted.tolist(), tokens.tolist()) == ([0], [1])


def test_rows_that_do_not_fit_are_refused() -> None:
    p, q, drafts, uniforms = rows(2, 2, 8, 0, torch.float32)
    with pytest.raises(KernelUnsupported, match="don't fit"):
        reject(p, q[:, :1].contiguous(), drafts, uniforms)
    with pytest.raises(KernelUnsupported, match="contiguous"):
        reject(p.transpose(1, 2).contiguous().transpose(1, 2), q, drafts, uniforms)
