"""The tiers below an engine's pool, as the graph names them: what is offered to them, and what comes back."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flowinfer.cache.disk.retention import Retention
from flowinfer.cache.disk.store import DiskStore, StoreSettings
from flowinfer.cache.policies.admission import make_admission
from flowinfer.cache.tiers import DISK, OBJECT, RETENTION, DiskTierConfig, ObjectTierConfig, Tiers, tenant_of
from flowinfer.engine.store_tier import Cost, Removed, Store, StoreTier, Wanted
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
    """Which tiers want what follows a prompt, and how it is to be kept."""

    tiers: Sequence[StoreTier]
    how: Wanted


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
            tier.keep(names[:num], how)
            if follows:
                following.append(tier)
        self._following[prompt.id] = _Following(following, how)
        if len(self._following) > MAX_FOLLOWING:
            self._following.popitem(last=False)

    def keep_output(self, prompt: Prompt, names: Sequence[bytes], first: int) -> None:
        """Offers the complete blocks of a request that has ended, from number `first` on, which this worker has."""
        if not _may_leave_memory(prompt):
            return
        known = self._following.pop(prompt.id, None)
        tiers = known.tiers if known else [tier for tier in self.tiers if tier.admission.admit(names)[1]]
        for tier in tiers:
            tier.keep(names[first:], _how(prompt))

    def returned(self, request: str, names: Sequence[bytes]) -> None:
        """Offers the blocks that a lessee has filled, behind the prompt."""
        if (known := self._following.pop(request, None)) is not None:
            for tier in known.tiers:
                tier.keep(names, known.how)

    # ----------------------------------------------------------------------------------------------------- restoring

    def restore(self, prompt: Prompt, held: HeldKV, then: Callable[[int], Iterable[Message] | None]) -> bool:
        """Asks the tiers for the blocks behind those that `held` has. False: there is nothing to ask for.

        They are asked whatever the hint says: one look-up is a millisecond, and right after a start hints lag behind.
        then(num_blocks): as many are in place now; 0 where they aren't there, are damaged, or are computed faster.
        """
        at = held.num_committed
        if not any(tier.is_open for tier in self.tiers) or prompt.prefix is None or at >= len(prompt.prefix.hashes):
            return False
        names = prompt.prefix.hashes[at:]
        blocks = held.blocks[at : at + len(names)]
        self.engine.pool.hold(blocks)
        context = at * self.engine.layout.block_tokens
        self.ctx.submit(
            partial(self._read, names, blocks, context, self.engine.cost.coefficients, self.engine.staging.mark()),
            partial(self._read_done, blocks, then),
        )
        return True

    def _read(self, names: list[bytes], blocks: list[int], context: int, cost: Cost, mark: Any) -> int:
        """Each tier goes on where the one before ended, round by round until none has more."""
        done, before, size = 0, -1, self.engine.layout.block_tokens
        while before < done < len(names):
            before = done
            for tier in self.tiers:
                if done < len(names):
                    done += tier.read(names[done:], blocks[done:], context + done * size, cost, mark)
        return done

    def _read_done(
        self, blocks: list[int], then: Callable[[int], Iterable[Message] | None], result: int | BaseException
    ) -> Iterable[Message] | None:
        self.engine.pool.release(blocks)
        for tier in self.tiers:
            tier.tell_changes()
        if isinstance(result, BaseException):
            log.error("cache tiers: blocks weren't read", exc_info=result)
            result = 0
        return then(result)


def _may_leave_memory(prompt: Prompt) -> bool:
    return prompt.cache_keep_s != 0 and not prompt.cache_in_memory


def _how(prompt: Prompt) -> Wanted:
    return Wanted(prompt.cache_class, tenant_of(prompt.cache_salt), prompt.cache_keep_s)


def _open(ctx: Context, engine: Engine, config: Tiers, retention: Retention) -> list[StoreTier]:
    key = config.encryption.read_key() if config.encryption else None
    tiers: list[StoreTier] = []
    block = engine.layout.block_bytes
    try:
        if (disk := config.disk) is not None:
            opened = partial(_open_disk, ctx, disk, retention, key)
            with _leave_out(disk):
                tiers.append(StoreTier(DISK, ctx, engine, opened, make_admission(config.write, disk.size // block)))
        if (objects := config.object) is not None:
            size = None if objects.size is None else objects.size // block
            opened = partial(_open_objects, objects, retention, key, engine.layout.digest)
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
