"""Makes what a worker process is started with from what its supervisor has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from flowinfer.graph.plan import Plan
from flowinfer.runtime.boot import ArenaRange, Boot
from flowinfer.runtime.child import Child
from flowinfer.runtime.threads import is_crowded

if TYPE_CHECKING:
    from flowinfer.runtime.supervisor import Supervisor


def boot_of(supervisor: Supervisor, child: Child, plan: Plan) -> tuple[Boot, list[int]]:
    """The boot data of the next process of this instance, and the file descriptors that it inherits."""
    listener = supervisor.listener if child.name == supervisor.front else None
    arenas = tuple(quarantined(child, arena) for arena in supervisor.arenas.get(child.name, ()))
    engines = supervisor.engines
    boot = Boot(
        plan=plan,
        worker=child.worker,
        replica=child.replica,
        generation=child.generation,
        run_dir=str(supervisor.run_dir.path),
        supervisor_data=supervisor.endpoints.data,
        supervisor_control=supervisor.endpoints.control,
        life_fd=supervisor.life_fd,
        threads=plan.workers[child.worker].threads,
        crowded=is_crowded(_threads(supervisor, plan), _cores()),
        device=plan.workers[child.worker].device,
        engine_index=engines.index(child.name) if child.name in engines else 0,
        num_engines=max(1, len(engines)),
        listener_fd=listener.fileno() if listener else None,
        arenas=arenas,
    )
    return boot, [boot.life_fd, *(arena.fd for arena in arenas), *([listener.fileno()] if listener else [])]


def quarantined(child: Child, arena: ArenaRange) -> ArenaRange:
    """The range, with the blocks in it that others still read from the dead generation."""
    mine = range(arena.first_block, arena.end_block)
    leases = {
        request: (lessee, tuple(b for b in blocks if b in mine)) for request, (lessee, blocks) in child.leases.items()
    }
    return msgspec.structs.replace(arena, quarantined={id: lease for id, lease in leases.items() if lease[1]})


def _threads(supervisor: Supervisor, plan: Plan) -> dict[str, tuple[int, int]]:
    """Processes, and threads of each, of the workers that run models."""
    running = [plan.workers[name] for name in supervisor.layouts if name in plan.workers]
    return {worker.name: (worker.replicas, worker.threads) for worker in running}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
