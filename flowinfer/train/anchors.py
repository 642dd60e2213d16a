"""Where a draft head is trained and measured: anchors in rows of text, and the head's pass over them.

Dimensions: n anchors, B rows or block, S positions, H hidden, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.engine.draft.head import DraftHead

AT_FIRST_STEP = 0.02


def anchors_of(
    lengths: Tensor, prompts: Tensor, each: int, window: int, *, from_answer: float = 0.6
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, anchor positions and first context positions, int [B * each].

    An anchor is a token of the answer that has a successor, or now and then the prompt's last token, where decoding
    begins without any context. Context begins at the answer's start (the last token of
    the prompt) with probability from_answer, else anywhere in the answer or in the window.
    """
    device = lengths.device
    rows = torch.arange(len(lengths), device=device).repeat_interleave(each)
    first, last = prompts[rows], lengths[rows] - 2
    at = first + (torch.rand(len(rows), device=device) * (last - first + 1)).long()
    at = torch.where(torch.rand(len(rows), device=device) < AT_FIRST_STEP, first - 1, at)
    draw, place = torch.rand(2, len(rows), device=device)
    lowest = torch.where(draw < from_answer + (1 - from_answer) / 2, first - 1, (at - window).clamp(min=0))
    start = torch.where(draw < from_answer, first - 1, lowest + (place * (at - lowest + 1)).long())
    return rows, at, start


def block_hidden(head: DraftHead, tokens: Tensor, features: Tensor, rows: Tensor, at: Tensor, start: Tensor) -> Tensor:
    """h [n, B, H] of anchors at positions `at` of their rows, which see context from `start` on."""
    count, size = tokens.shape
    context = head.context(features)
    keys = head.keys(context, torch.arange(size, device=tokens.device).expand(count, -1))
    back = at.unsqueeze(1) - head.window + torch.arange(head.window, device=at.device)
    seen = (back >= start.unsqueeze(1)) & (back >= 0)
    places = (rows.unsqueeze(1) * size + back.clamp(min=0)).flatten()
    flat = keys.flatten(1, 2)
    kept = flat.index_select(1, places).unflatten(1, back.shape)
    newest = context.flatten(0, 1).index_select(0, rows * size + (at - 1).clamp(min=0))
    newest = newest * (start < at).unsqueeze(1)
    return head.hidden(tokens[rows, at], at, kept, seen, newest)


def following(tokens: Tensor, rows: Tensor, at: Tensor, count: int) -> Tensor:
    """int [n, count]: the tokens at and after each anchor, clamped at the row's end."""
    places = (at.unsqueeze(1) + torch.arange(count, device=at.device)).clamp(max=tokens.shape[1] - 1)
    return tokens[rows.unsqueeze(1), places]
