"""KV by NIXL (github.com/ai-dynamo/nixl): the owner writes into the taker's pool by RDMA, or by what UCX finds.

Both ends register their pool once and prepare a list of its blocks, so that a push is two rows of indices. The metadata
of an agent travels with the taker's request; no port listens for it. Which network interfaces UCX may use is said in
the file (kv-transfer's `interfaces`): left to itself it may take one that leads nowhere. In host memory every block's
checksum travels with the news of it and is verified by the taker.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowinfer.message import Ids, KVData, KVPushed
from flowinfer.transfer.check import check_of
from flowinfer.transfer.links import read_address
from flowinfer.transfer.pushing import LinkSender
from flowinfer.transfer.transport import DamagedBlock, Push, TransferError

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine

BACKEND = "UCX"
PAUSE_S = 0.001


class PoolAddress(msgspec.Struct, frozen=True, array_like=True):
    """A pool as another agent writes to it. base: address of its first block; device: of CUDA memory, else 0.

    metadata: of its agent, in NIXL's own form.
    """

    metadata: bytes
    base: int
    num_blocks: int
    block_bytes: int
    device: int
    is_cuda: bool


class Agent:
    """NIXL's agent of one engine, with its pool registered. Its calls take turns: NIXL's own locks are off."""

    def __init__(self, engine: Engine, interfaces: Sequence[str]) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl._api import nixl_agent, nixl_agent_config

        self.kv, self.layout = engine.kv, engine.layout
        self.is_cuda = engine.kv.device.type == "cuda"
        self.device = engine.kv.device.index or 0 if self.is_cuda else 0
        self.memory = "VRAM" if self.is_cuda else "DRAM"
        self.lock = threading.Lock()
        ctx = engine.ctx
        name = f"{ctx.worker}/{ctx.generation}/{uuid.uuid4().hex[:8]}"
        try:
            self.nixl: Any = nixl_agent(name, nixl_agent_config(backends=[]))
            self.nixl.create_backend(BACKEND, {"ucx_devices": ",".join(interfaces)})
            size = len(self.kv) * self.layout.block_bytes
            whole = [(self.kv.data_ptr(), size, self.device, "kv")]
            self.registered = self.nixl.register_memory(whole, self.memory, backends=[BACKEND])
            self.blocks = self.prepare("NIXL_INIT_AGENT", self.address())
        except Exception as error:  # NIXL's own errors have no common base
            help = "Check `interfaces` of kv-transfer against `ucx_info -d`."
            raise TransferError(f"NIXL doesn't start: {error}", help=help) from error

    def address(self) -> PoolAddress:
        """Of our pool."""
        return PoolAddress(
            metadata=self.nixl.get_agent_metadata(),
            base=self.kv.data_ptr(),
            num_blocks=len(self.kv),
            block_bytes=self.layout.block_bytes,
            device=self.device,
            is_cuda=self.is_cuda,
        )

    def prepare(self, owner: str, pool: PoolAddress) -> Any:
        """A prepared list of all blocks of a pool, whose agent is called `owner`."""
        starts = pool.base + np.arange(pool.num_blocks, dtype=np.uint64) * pool.block_bytes
        rows = np.empty((pool.num_blocks, 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = starts, pool.block_bytes, pool.device
        memory = "VRAM" if pool.is_cuda else "DRAM"
        descriptors = self.nixl.get_xfer_descs(rows, mem_type=memory)
        return self.nixl.prep_xfer_dlist(owner, descriptors, mem_type=memory, backends=[BACKEND])

    def bytes_of(self, block: int) -> NDArray[np.uint8]:
        """Of a block in host memory."""
        data: NDArray[np.uint8] = self.kv[block].view(torch.uint8).flatten().numpy()
        return data


@dataclass
class Link:
    """A taker's agent as ours knows it, and the prepared list of its blocks."""

    name: str
    blocks: Any


class Writing:
    """Blocks on their way."""

    def __init__(self, agent: Agent, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def query(self) -> bool:
        with self._agent.lock:
            if self._state == "PROC":
                self._state = self._ask()
            if self._state == "PROC":
                return False
            self._release()
        if self._state != "DONE":
            raise TransferError(f"NIXL couldn't write: {self._state}")
        return True

    def synchronize(self) -> None:
        """Waits until they are there, or won't come."""
        pause = threading.Event()
        try:
            while not self.query():
                pause.wait(PAUSE_S)
        except TransferError:
            pass  # nothing is under way any more

    def _ask(self) -> str:
        try:
            return str(self._agent.nixl.check_xfer_state(self._handle))
        except Exception as error:  # a lost connection, say; NIXL's own errors have no common base
            return str(error) or type(error).__name__

    def _release(self) -> None:
        if self._handle is not None:
            self._agent.nixl.release_xfer_handle(self._handle)
            self._handle = None


class NixlLinks:
    """Connections to takers."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def read(self, push: Push) -> PoolAddress:
        return read_address(push, PoolAddress)

    def open(self, address: PoolAddress) -> Link:
        with self.agent.lock:
            try:
                name = self.agent.nixl.add_remote_agent(address.metadata)
                name = name.decode() if isinstance(name, bytes) else name
                self.agent.nixl.make_connection(name, [BACKEND])
                return Link(name, self.agent.prepare(name, address))
            except Exception as error:  # NIXL's own errors have no common base
                raise TransferError(f"NIXL doesn't connect: {error}") from error

    def close(self, link: Link) -> None:
        with self.agent.lock:
            self.agent.nixl.release_dlist_handle(link.blocks)
            self.agent.nixl.remove_remote_agent(link.name)

    def mark(self) -> Any:
        if not self.agent.is_cuda:
            return None
        queued: torch.cuda.Event = torch.cuda.current_stream(self.agent.kv.device).record_event()
        return queued

    def copy(self, link: Link, ids: Ids, mark: Any) -> Writing:
        if mark is not None:
            mark.synchronize()  # NIXL knows no streams; what a step has computed is there already
        nixl, ours, theirs = self.agent.nixl, np.ascontiguousarray(ids[:, 1]), np.ascontiguousarray(ids[:, 0])
        with self.agent.lock:
            try:
                handle = nixl.make_prepped_xfer(
                    "WRITE", self.agent.blocks, ours, link.blocks, theirs, backends=[BACKEND]
                )
                return Writing(self.agent, handle, nixl.transfer(handle))
            except Exception as error:  # NIXL's own errors have no common base
                raise TransferError(f"NIXL doesn't write: {error}") from error

    def checks(self, ids: Ids) -> list[int]:
        if self.agent.is_cuda:
            return [0] * len(ids)
        return [check_of(self.agent.bytes_of(block)) for block in ids[:, 1].tolist()]


class NixlReceiver:
    """The taker's half: says where the pool is, and checks what was written to it."""

    is_written_to = True

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._address = msgspec.msgpack.encode(agent.address())

    def address(self) -> bytes:
        if self.agent.is_cuda:  # blocks that are set aside must be at rest, and NIXL knows no events
            torch.cuda.current_stream(self.agent.kv.device).synchronize()
        return self._address

    def land(self, arrived: KVData | KVPushed, targets: Sequence[int]) -> Sequence[int]:
        assert isinstance(arrived, KVPushed), "what is written to our pool brings no bytes"
        for index, check in enumerate(arrived.checks, arrived.first):
            if check and check_of(self.agent.bytes_of(targets[index])) != check:
                raise DamagedBlock(f"block {index} of request {arrived.id} isn't what was sent")
        return range(arrived.first, arrived.first + len(arrived.checks))

    def close(self) -> None:
        return None


def make_sender(engine: Engine) -> LinkSender:
    """Of this engine. Raises TransferError where NIXL doesn't start."""
    return LinkSender(engine, NixlLinks(_agent_of(engine)))


def make_receiver(engine: Engine) -> NixlReceiver:
    """Of this engine. Raises TransferError where NIXL doesn't start."""
    return NixlReceiver(_agent_of(engine))


def _agent_of(engine: Engine) -> Agent:
    """One for both halves of an engine."""
    interfaces = [name for settings in engine.ctx.settings_of("kv-transfer") for name in settings.get("interfaces", ())]
    return engine.ctx.shared(("nixl", engine.layout.digest), lambda: Agent(engine, interfaces), arms=True)
