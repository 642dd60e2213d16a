"""Decides which prompt tokens the next prefill step runs. Knows no model and no memory; time comes as predictions.

Deficit round-robin over buckets, in predicted seconds: the time of a step is owed to the buckets with work in equal
parts and charged to those that got it; the bucket that is owed most goes first and takes what fits, the next ones fill
up the step. So a huge prompt holds up a short one by about a step, no bucket starves, and no step is left empty while
there is work. (Shreedhar & Varghese, "Efficient fair queueing using deficit round-robin", SIGCOMM 1995, with the step
as quantum.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

MIN_CHUNK = (
    16  # tokens that a step runs even where none would fit: a budget set too low slows prompts, never stops them
)

AUTO_S, MOST_AUTO_S = 0.05, 0.5  # between which `auto` chooses the longest time of a step


def auto_budget(fixed_s: float, *, decoding: bool, decode_s: float = 0.0) -> float:
    """Seconds of a step at most, where one without tokens would take fixed_s, and one that decodes takes decode_s.

    That is then a sixteenth of a step at most, and while sequences decode on the device, prompts have six sevenths of
    its time. Where none does, so that only other prompts wait for the step's end, a 64th.
    """
    wanted = max(16 * fixed_s, 6 * decode_s) if decoding else 64 * fixed_s
    return min(max(AUTO_S, wanted), MOST_AUTO_S)


class CostModel(Protocol):
    """What is asked of engine.cost.StepTimeModel."""

    def predict(self, tokens: int, pairs: int) -> float: ...

    def tokens_within(self, budget_s: float, context: int, *, beside: tuple[int, int] = (0, 0)) -> int: ...


@dataclass(frozen=True)
class Chunk:
    """Run `count` tokens of prompt `id`, beginning at position `start`."""

    id: str
    start: int
    count: int


@dataclass
class _Progress:
    id: str
    bucket: str | None
    end: int  # position after the last token to compute
    done: int  # tokens computed or reused


@dataclass
class _Queue:
    """Prompts of one bucket, first come, first served. deficit: predicted seconds that the bucket is owed."""

    prompts: dict[str, _Progress] = field(default_factory=dict)
    deficit: float = 0.0


@dataclass
class _Step:
    """A step being filled: its chunks, and their tokens and query-key pairs so far."""

    chunks: list[Chunk] = field(default_factory=list)
    tokens: int = 0
    pairs: int = 0

    def take(self, progress: _Progress, count: int) -> None:
        self.chunks.append(Chunk(progress.id, progress.done, count))
        self.tokens += count
        self.pairs += count * progress.done + count * (count + 1) // 2


class PrefillScheduler:
    """Prompts in progress, and the steps that compute them. token_budget: tokens a step instead of a time.

    Chunks end at multiples of block_tokens where the budget allows, so that blocks are complete and shared early.
    """

    def __init__(self, *, token_budget: int | None = None, block_tokens: int = 64) -> None:
        self.token_budget = token_budget
        self.block_tokens = block_tokens
        self._queues: dict[str | None, _Queue] = {}  # only those with work
        self._progress: dict[str, _Progress] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._progress

    def __len__(self) -> int:
        return len(self._progress)

    @property
    def has_work(self) -> bool:
        """True while any prompt has tokens to compute."""
        return bool(self._progress)

    @property
    def waiting_tokens(self) -> dict[str | None, int]:
        """Tokens still to compute, by bucket with work."""
        return {
            bucket: sum(progress.end - progress.done for progress in queue.prompts.values())
            for bucket, queue in self._queues.items()
        }

    @property
    def waiting_prompts(self) -> dict[str | None, int]:
        """Prompts in progress, by bucket with work."""
        return {bucket: len(queue.prompts) for bucket, queue in self._queues.items()}

    def add(self, id: str, bucket: str | None, num_tokens: int, num_cached: int = 0) -> bool:
        """Takes a prompt whose KV is wanted up to num_tokens and is there up to num_cached. False: nothing to compute.

        Raises ValueError for an id that is in progress already.
        """
        if id in self._progress:
            raise ValueError(f"prompt {id!r} is in progress already")
        if num_cached >= num_tokens:
            return False
        progress = self._progress[id] = _Progress(id, bucket, num_tokens, num_cached)
        self._queues.setdefault(bucket, _Queue()).prompts[id] = progress
        return True

    def remove(self, id: str) -> None:
        """Forgets a prompt, at any time; unknown ids are normal."""
        progress = self._progress.pop(id, None)
        if progress is None:
            return
        queue = self._queues[progress.bucket]
        del queue.prompts[id]
        if not queue.prompts:
            del self._queues[progress.bucket]  # with its deficit: an idle bucket saves nothing up, and owes nothing

    def advance(self, id: str, count: int) -> bool:
        """Tells that `count` more tokens of a prompt are computed. True: all are, and it's forgotten here."""
        progress = self._progress.get(id)
        if progress is None:
            return False
        progress.done += count
        if progress.done < progress.end:
            return False
        self.remove(id)
        return True

    def plan(self, budget_s: float, cost: CostModel, *, reserved_s: float = 0.0) -> list[Chunk]:
        """Chunks of the next step, at most one a prompt, predicted to take at most budget_s - reserved_s together.

        reserved_s: what else must fit the budget, as a decode step between. Where not even MIN_CHUNK tokens fit, the
        prompt that is first in line gets so many all the same. Call `advance` for what ran before planning again.
        """
        room_s = budget_s - reserved_s
        step, spent = _Step(), 0.0
        spent_by: dict[str | None, float] = {}
        for bucket, queue in sorted(self._queues.items(), key=lambda item: -item[1].deficit):
            for progress in queue.prompts.values():
                count = self._chunk(step, progress, room_s, cost)
                if count:
                    step.take(progress, count)
                if progress.done + count < progress.end:
                    break  # the rest of this prompt goes before the next one of its bucket
            total = cost.predict(step.tokens, step.pairs) if step.chunks else 0.0
            spent_by[bucket], spent = total - spent, total
        self._settle(spent_by)
        return step.chunks

    def _chunk(self, step: _Step, progress: _Progress, room_s: float, cost: CostModel) -> int:
        """Tokens of this prompt that the step can still take."""
        left = progress.end - progress.done
        if self.token_budget is None:
            fit = cost.tokens_within(room_s, progress.done, beside=(step.tokens, step.pairs))
        else:
            fit = self.token_budget - step.tokens
        if fit >= left:
            return left
        to_boundary = (progress.done + fit) // self.block_tokens * self.block_tokens - progress.done
        if to_boundary > 0:
            return to_boundary
        return 0 if step.chunks else min(max(fit, MIN_CHUNK), left)

    def _settle(self, spent_by: dict[str | None, float]) -> None:
        """Owes the step's time to all buckets in equal parts and charges it to those that got it."""
        share = sum(spent_by.values()) / max(1, len(spent_by))
        for bucket, spent in spent_by.items():
            self._queues[bucket].deficit += share - spent
