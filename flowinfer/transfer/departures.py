"""Sequences that leave a decoding worker while they run: offered with their KV to another, or computed again elsewhere.

The sending half of a hand-over; the receiving half is kv-transfer's. A sequence stays ours until the other worker says
by KVRelease that it has all of it: should that one refuse or die, it goes on here as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from flowinfer.message import HandOff, PrefixHint, Prompt, Replay, Sequence
from flowinfer.observe import metrics

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.stage import Context

MAX_OFFERED = 8  # at once: each pauses from its offer until its first step elsewhere, and copies cost the other a step
AGAIN_S = 0.25  # until a sequence that was refused for want of room is offered again; it runs on here meanwhile


class Departures:
    """What of one decode stage is on its way out. mode "": nothing leaves.

    offered: sequences lent to the worker that shall go on with them, and which; they don't run here meanwhile.
    """

    def __init__(self, ctx: Context, engine: Engine) -> None:
        self.ctx, self.engine = ctx, engine
        self.mode: Literal["", "handoff", "replay"] = ""
        self.offered: dict[str, tuple[Sequence, str]] = {}
        self._again: dict[str, float] = {}
        self._turn = 0
        engine.on_release.append(self._released)

    def choose(self, requests: Iterable[str]) -> list[str]:
        """Those of the requests, in their order, that go now."""
        if self.mode == "replay":
            return list(requests) if self.ctx.instances("prefill") else []
        if not self.ctx.instances("kv-transfer"):
            return []
        now, room = self.ctx.clock.now(), MAX_OFFERED - len(self.offered)
        return [request for request in requests if self._again.get(request, 0.0) <= now][: max(0, room)]

    def send(self, sequence: Sequence) -> None:
        """Offers a sequence, or has it computed again. It holds its KV here; `history` of the holding is set."""
        if self.mode == "handoff":
            self._offer(sequence)
        else:
            self._replay(sequence)
        metrics.counter("sequences_moved_total").labels(by=self.mode).inc()

    def take_back(self, request: str) -> Sequence | None:
        """An offer that came to nothing: the sequence goes on here. None if it isn't offered (any more).

        Of one that was cancelled meanwhile, what was lent comes free.
        """
        if request not in self.offered:
            held = self.engine.held.get(request)
            if held is not None and held.lessee is not None:
                held.lessee = None
                self.engine.release(request, held.history)
            return None
        sequence, _ = self.offered.pop(request)
        self.engine.held[request].lessee = None
        self._again[request] = self.ctx.clock.now() + AGAIN_S
        metrics.counter("sequences_moved_total").labels(by="taken_back").inc()
        return sequence

    def forget(self, request: str) -> None:
        """The request was cancelled; what is lent of it comes free when the other worker lets go."""
        self.offered.pop(request, None)
        self._again.pop(request, None)

    def _offer(self, sequence: Sequence) -> None:
        instances = self.ctx.instances("kv-transfer")
        self._turn += 1
        to = instances[self._turn % len(instances)]
        sequence.kv = self.engine.lend(sequence.id, to)
        if sequence.progress is not None:
            sequence.progress.giver = self.ctx.worker
            sequence.kv.cached_tokens = sequence.progress.cached_tokens
        self.offered[sequence.id] = sequence, to
        for told in self.engine.on_offer:
            told(sequence.id)
        self.ctx.send(HandOff(sequence=sequence), to=to)

    def _replay(self, sequence: Sequence) -> None:
        held, history = self.engine.held[sequence.id], sequence.history
        instances = self.ctx.instances("prefill")
        self._turn += 1
        to = held.owner if held.owner in instances else instances[self._turn % len(instances)]
        self.engine.release(sequence.id, history)  # names all blocks, so that what is cached serves to come back
        names = list(held.names)
        prompt = Prompt(**{name: getattr(sequence, name) for name in Prompt.__struct_fields__})
        if prompt.prefix is not None:  # what we wrote into leased blocks, its owner has
            prompt.prefix = PrefixHint(hashes=names, owners=[to] * held.num_leased if to == held.owner else [])
        self.ctx.hand_on(sequence.id, to)
        self.ctx.send(Replay(prompt=as_replay(prompt, self.ctx.worker)), to=to)

    def _released(self, request: str) -> None:
        self._again.pop(request, None)
        if request in self.offered:
            _, taker = self.offered.pop(request)
            self.ctx.hand_on(request, taker)


def as_replay(prompt: Prompt, giver: str) -> Prompt:
    """The prompt of a running sequence, to be computed again. What was told of the prompt isn't told again."""
    if prompt.progress is not None:
        prompt.progress.giver = giver
        prompt.sampling = msgspec.structs.replace(prompt.sampling, prompt_logprobs=None)
    return prompt
