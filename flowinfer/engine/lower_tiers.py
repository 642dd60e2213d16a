"""The tiers below an engine's pool, as the graph names them: what is offered to them, and what comes back."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flowinfer.cache.disk.retention import Retention
from flowinfer.cache.disk.store import DiskStore, StoreSettings
from flowinfer.cache.policies.admission import make_admission
from flowinfer.cache.replay import leading
from flowinfer.cache.tiers import DISK, OBJECT, RETENTION, DiskTierConfig, ObjectTierConfig, Tiers, tenant_of
from flowinfer.engine.store_tier import ENTRIES, STATE, Cost, Removed, Store, StoreTier, Wanted
from flowinfer.errors import FlowInferError
from flowinfer.message import Message, Prompt
from flowinfer.stage import Context
from flowinfer.units import parse_duration

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.engine.held import HeldKV

log = logging.getLogger(__name__)
MAX_FOLLOWING = 10_000  # requests; of those that end elsewhere nobody tells


class _Following(NamedTuple):
    """Which tiers want what follows a prompt, and how it is to be kept. before: the last blocks of the prompt."""

    tiers: Sequence[StoreTier]
    how: Wanted
    before: list[bytes]


class Restored(NamedTuple):
    """What the tiers gave: the entries of so many more blocks, and the state of these (numbers)."""

    num_blocks: int = 0
    states: Sequence[int] = ()


@dataclass(frozen=True)
class _Reading:
    """What is read for one prompt. at: blocks that were found already, of which `partial` lack their state.

    blocks: of ours, by number, that may be written.
    """

    names: Sequence[bytes]
    blocks: dict[int, int]
    at: int
    partial: frozenset[int]
    cost: Cost
    mark: Any


class LowerTiers:
    """Nearest first. Shared by the stages of an engine; all methods are for the worker's loop."""

    def __init__(self, ctx: Context, engine: Engine, tiers: Sequence[StoreTier]) -> None:
        self.ctx, self.engine, self.tiers = ctx, engine, tiers
        self._following: OrderedDict[str, _Following] = OrderedDict()  # by request
        self._num_users = 0

    @classmethod
    def of(cls, ctx: Context, engine: Engine) -> LowerTiers | None:
        """Those that the graph's cache-lookup asks for, shared by the stages of this engine; None without any."""

        def make() -> LowerTiers | None:
            for settings in ctx.settings_of("cache-lookup"):
                config = Tiers.model_validate(settings.get("tiers", {}))
                if tiers := _open(ctx, engine, config, Retention(_retention(settings))):
                    return cls(ctx, engine, tiers)
            return None

        lower = ctx.shared(("lower-tiers", engine.layout.digest), make, arms=True)
        if lower is not None:
            lower.join()
        return lower

    def join(self) -> None:
        """One more stage uses the tiers."""
        self._num_users += 1
        for tier in self.tiers:
            if not tier.is_open:
                tier.open()

    def close(self) -> None:
        """One stage less; the last one writes what is still queued and lets go of the stores."""
        self._num_users -= 1
        if not self._num_users:
            for tier in self.tiers:
                tier.close()

    def announce(self, to: str | None = None) -> None:
        """Tells which blocks of this model the tiers hold."""
        for tier in self.tiers:
            tier.announce(to)

    # ------------------------------------------------------------------------------------------------------- writing

    def keep_prompt(self, prompt: Prompt, names: Sequence[bytes]) -> None:
        """Offers what is worth it of the complete blocks of a prompt that was computed."""
        if not _may_leave_memory(prompt):
            return
        how, following = _how(prompt), []
        for tier in self.tiers:
            num, follows = tier.admission.admit(names)
            tier.keep(names[:num], how, ends=self._ends(names[:num]))
            if follows:
                following.append(tier)
        self._following[prompt.id] = _Following(following, how, list(self._ends(names)))
        if len(self._following) > MAX_FOLLOWING:
            self._following.popitem(last=False)

    def keep_output(self, prompt: Prompt, names: Sequence[bytes], first: int) -> None:
        """Offers the complete blocks of a request that has ended, from number `first` on, which this worker has."""
        if not _may_leave_memory(prompt):
            return
        known = self._following.pop(prompt.id, None)
        tiers = known.tiers if known else [tier for tier in self.tiers if tier.admission.admit(names)[1]]
        for tier in tiers:
            tier.keep(names[first:], _how(prompt), ends=self._ends(names))

    def returned(self, request: str, names: Sequence[bytes]) -> None:
        """Offers the blocks that a lessee has filled, behind the prompt."""
        if (known := self._following.pop(request, None)) is not None:
            for tier in known.tiers:
                tier.keep(names, known.how, ends=self._ends([*known.before, *names]))

    def _ends(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Those of the blocks, which follow each other, whose state whoever goes on behind them needs."""
        return names[max(0, len(names) - self.engine.prefixes.rule.state_blocks) :]

    # ----------------------------------------------------------------------------------------------------- restoring

    def restore(self, prompt: Prompt, held: HeldKV, then: Callable[[Restored], Iterable[Message] | None]) -> bool:
        """Asks the tiers for what `held` lacks of the prompt. False: there is nothing to ask for.

        They are asked whatever the hint says: one look-up is a millisecond, and right after a start hints lag behind.
        then(restored): so much is in place now; nothing where it isn't there, is damaged, or is computed faster.
        """
        names = prompt.prefix.hashes if prompt.prefix else []
        if not any(tier.is_open for tier in self.tiers) or not self.engine.prefixes.can_improve(held, len(names)):
            return False
        at = held.num_found
        blocks = held.spare | dict(enumerate(held.blocks[at : len(names)], at))
        reading = _Reading(
            names, blocks, at, frozenset(held.partial), self.engine.cost.coefficients, self.engine.staging.mark()
        )
        self.engine.pool.hold(blocks.values())
        self.ctx.submit(partial(self._read, reading), partial(self._read_done, list(blocks.values()), then))
        return True

    def _read(self, reading: _Reading) -> Restored:
        """What is worth it of the entries, then the state at their end."""
        rule, at = self.engine.prefixes.rule, reading.at
        reach = self._reach(reading)
        stored = self._stored_states(reading, reach)
        end, states = rule.goal(at, reach, reading.partial, stored)
        done = at + self._read_entries(reading, end, replays=not states)
        if done < end:
            again, states = rule.goal(at, done, reading.partial, stored)
            done = min(done, max(at, again))
        if states and not self._read_states(reading, states):
            states = []
        return Restored(max(0, done - at), states)

    def _reach(self, reading: _Reading) -> int:
        """The end of what the tiers hold together, from where the reading begins."""
        end, before = reading.at, -1
        while before < end:
            before = end
            for tier in self.tiers:
                end += leading(tier.present(reading.names[end:])) if end < len(reading.names) else 0
        return end

    def _stored_states(self, reading: _Reading, reach: int) -> set[int]:
        """Blocks, of those that may be written, whose state some tier has."""
        if not self.engine.prefixes.rule.state_blocks:
            return set()
        numbers = sorted(number for number in reading.blocks if number < reach)
        names = [reading.names[number] for number in numbers]
        found = [tier.present(names, STATE) for tier in self.tiers if names]
        return {number for number, *there in zip(numbers, *found, strict=True) if any(there)}

    def _read_entries(self, reading: _Reading, end: int, *, replays: bool) -> int:
        """Each tier goes on where the one before ended, until none has more; returns how many blocks."""
        done, before, size = reading.at, -1, self.engine.layout.block_tokens
        replayed = (self.engine.prefixes.rule.blocks or 0) * size if replays else 0
        while before < done < end:
            before = done
            for tier in self.tiers:
                if done < end:
                    blocks = [reading.blocks[number] for number in range(done, end)]
                    how = {"context": done * size, "cost": reading.cost, "mark": reading.mark, "replayed": replayed}
                    num = tier.read(reading.names[done:end], blocks, **how)
                    done, replayed = done + num, 0 if num else replayed
        return done - reading.at

    def _read_states(self, reading: _Reading, numbers: Sequence[int]) -> bool:
        names = [reading.names[number] for number in numbers]
        blocks = [reading.blocks[number] for number in numbers]
        return any(tier.read_states(names, blocks, reading.mark) for tier in self.tiers)

    def _read_done(
        self, blocks: list[int], then: Callable[[Restored], Iterable[Message] | None], result: Restored | BaseException
    ) -> Iterable[Message] | None:
        self.engine.pool.release(blocks)
        for tier in self.tiers:
            tier.tell_changes()
        if isinstance(result, BaseException):
            log.error("cache tiers: blocks weren't read", exc_info=result)
            result = Restored()
        return then(result)


def _may_leave_memory(prompt: Prompt) -> bool:
    return prompt.cache_keep_s != 0 and not prompt.cache_in_memory


def _how(prompt: Prompt) -> Wanted:
    return Wanted(prompt.cache_class, tenant_of(prompt.cache_salt), prompt.cache_keep_s)


def _open(ctx: Context, engine: Engine, config: Tiers, retention: Retention) -> list[StoreTier]:
    key = config.encryption.read_key() if config.encryption else None
    tiers: list[StoreTier] = []
    block = engine.layout.part_bytes(ENTRIES)
    try:
        if (disk := config.disk) is not None:
            opened = partial(_open_disk, ctx, disk, retention, key)
            with _leave_out(disk):
                tiers.append(StoreTier(DISK, ctx, engine, opened, make_admission(config.write, disk.size // block)))
        if (objects := config.object) is not None:
            size = None if objects.size is None else objects.size // block
            opened = partial(_open_objects, objects, retention, key, engine.namespace)
            tiers.append(StoreTier(OBJECT, ctx, engine, opened, make_admission(config.write, size)))
    except FlowInferError:
        for tier in tiers:
            tier.close()
        raise
    return tiers


@contextmanager
def _leave_out(disk: DiskTierConfig) -> Iterator[None]:
    """Where nobody chose the folder (a home that can't be written to, say), the service does without."""
    try:
        yield
    except FlowInferError as error:
        if disk.path is not None:
            raise
        log.warning("no disk tier: %s Set tiers.disk.path, or FLOWINFER_KV.", error.message)


def _open_disk(
    ctx: Context,
    config: DiskTierConfig,
    retention: Retention,
    key: bytes | None,
    removed: Removed,
    added: Removed,
    fault: Callable[[str], None],
) -> Store:
    settings = StoreSettings(
        path=config.folder,
        size=config.size,
        segment=config.segment,
        spare=config.spare,
        retention=retention,
        class_limits=config.class_sizes,
        tenant_limit=config.tenant_size,
        key=key,
    )
    return DiskStore(settings, wall=ctx.clock.wall, removed=removed, fault=fault)


def _open_objects(
    config: ObjectTierConfig,
    retention: Retention,
    key: bytes | None,
    namespace: str,
    removed: Removed,
    added: Removed,
    fault: Callable[[str], None],
) -> Store:
    from flowinfer.cache.objects.aging import ObjectLimits
    from flowinfer.cache.objects.client import Client
    from flowinfer.cache.objects.store import ObjectSettings, ObjectStore

    client = Client(
        config.url,
        options=config.options,
        credentials_file=config.credentials_file,
        profile=config.profile,
        timeout_s=config.timeout,
    )
    limits = ObjectLimits(config.size, config.class_sizes, config.tenant_size)
    settings = ObjectSettings(retention=retention, limits=limits, refresh_s=config.refresh, key=key)
    return ObjectStore(client, settings, removed=removed, added=added, fault=fault, listens=namespace)


def _retention(settings: dict[str, Any]) -> dict[str, float]:
    written = settings.get("retention", {})
    return {**RETENTION, **{cls: parse_duration(seconds) for cls, seconds in written.items()}}
