"""The meaning of spread_rows and advance_verified, a sequence at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from flowinfer.kernels.draw import SlotSettings
    from flowinfer.kernels.verify import Drafted, Rows


def spread_rows_reference(
    slots_B: Tensor, last_S: Tensor, lengths_S: Tensor, drafted: Drafted, settings: SlotSettings, rows: Rows
) -> None:
    """As spread_rows."""
    each = len(rows.tokens) // len(slots_B)
    rows.ids.fill_(-1)
    for b, slot in enumerate(slots_B.tolist()):
        part = slice(b * each, (b + 1) * each)
        rows.counts[b] = 0
        rows.tokens[part] = 0 if slot < 0 else last_S[slot]
        if slot < 0:
            continue
        length, limit = int(lengths_S[slot]), int(drafted.limits[slot])
        meant = min(int(drafted.num[slot]), int(drafted.most[slot]), limit - length - 1, each - 1)
        count = 1 + max(0, meant) if length < limit else 0
        rows.counts[b] = count
        for j in range(count):
            row = b * each + j
            rows.ids[row], rows.lengths[row] = row, length + j
            if j:
                rows.tokens[row] = drafted.tokens[slot, j - 1]
            for column, by_slot in zip(rows.settings, settings, strict=True):
                column[row] = by_slot[slot]


def advance_verified_reference(
    chosen_R: Tensor,
    slots_B: Tensor,
    rows: Rows,
    drafted: Drafted,
    last_S: Tensor,
    lengths_S: Tensor,
    out_BW: Tensor,
    history_SP: Tensor | None = None,
) -> None:
    """As advance_verified."""
    each = len(chosen_R) // len(slots_B)
    out_BW.zero_()
    for b, slot in enumerate(slots_B.tolist()):
        count = int(rows.counts[b])
        if not count:
            continue
        chosen = chosen_R[b * each : b * each + count].tolist()
        drafts = drafted.tokens[slot].tolist()
        held = 0
        while held < count - 1 and chosen[held] == drafts[held]:
            held += 1
        out_BW[b, 0] = count
        out_BW[b, 1 : 1 + count] = chosen_R[b * each : b * each + count]
        out_BW[b, 1 + each] = drafted.num[slot]
        out_BW[b, 2 + each :] = drafted.tokens[slot]
        length = int(lengths_S[slot])
        last_S[slot] = max(chosen[held], 0)
        lengths_S[slot] = length + held + 1
        if history_SP is not None:
            for j in range(held + 1):
                history_SP[slot, length + j] = max(chosen[j], 0)
        drafted.num[slot] = 0
