"""The main program of a worker process: reads its boot data, opens the stages, runs the loop, reports why it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from flowinfer.channel import Channel, Endpoints
from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError
from flowinfer.observe import logs
from flowinfer.runtime.arenas import DEFAULT_KV_BYTES, map_arena, private_arena
from flowinfer.runtime.boot import Boot, Report, report_path
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.device import gpu_arena, resolve_device
from flowinfer.runtime.events import SUPERVISOR
from flowinfer.runtime.group import Host
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.mailbox import bind, load_keys
from flowinfer.runtime.worker import Worker
from flowinfer.stage import Arena

MAX_TRACE = 8_000  # characters
LAST_WORDS_MS = 100  # for what a worker says last, as its counts


def main() -> None:
    """Never returns: leaves by os._exit, since pool threads of libraries would hold up an ordinary exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=Boot)
    threading.Thread(target=_outlive_nobody, args=(boot,), daemon=True, name="parent-watch").start()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger().handlers[0].setLevel(logging.WARNING)  # the terminal's; the log in the run directory has more
    logs.start(Path(boot.run_dir), boot.name, boot.generation)
    logs.set_level(boot.plan.log_level(boot.worker))
    code = 0
    try:
        serve(boot)
    except Exception as error:
        logging.getLogger("flowinfer.worker").error("%s gives up: %s", boot.name, error)
        _report(boot, error)
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def serve(boot: Boot) -> None:
    """Opens the stages of this worker and runs its loop until Stop. Raises StageError, TransportError."""
    channel = Channel(boot.name, boot.generation, epoch=boot.plan.epoch, keys=load_keys(boot.plan.network))
    bind(channel, boot.plan.network, Path(boot.run_dir))
    channel.connect(SUPERVISOR, 1, Endpoints(boot.supervisor_data, boot.supervisor_control))
    load = LoadStage(Path(boot.plan.file).parent, boot.plan.allow_local)
    worker = Worker(boot.plan, boot.worker, _host(boot), load, channel, clock=SystemClock())

    def progress(stage: str) -> None:
        _write(boot, Report(opening=stage))  # there even if the process is killed now
        worker.announce_opening(stage)

    worker.open(progress)
    if folder := os.environ.get("FLOWINFER_TEST"):  # set by `flowinfer test --real`, for its own service
        from flowinfer.testing.inside import join

        join(worker, Path(folder))
    worker.announce_ready()
    try:
        worker.run()
    finally:
        worker.close()
        channel.close(linger_ms=LAST_WORDS_MS)


def _host(boot: Boot) -> Host:
    listener = None if boot.listener_fd is None else socket.socket(fileno=boot.listener_fd)
    own = boot.plan.workers[boot.worker]
    device = resolve_device(boot.device, boot.engine_index)
    ranges = {arena.layout.digest: arena for arena in boot.arenas}
    mapped: dict[str, Arena] = {}
    size = own.kv_bytes or own.tier_bytes or DEFAULT_KV_BYTES

    def arena(layout: KVLayout) -> Arena:
        if layout.digest not in mapped:
            found = ranges.get(layout.digest)
            if device != "cpu":
                mapped[layout.digest] = gpu_arena(layout, own.kv_bytes, _sharers(boot, device))
            else:
                mapped[layout.digest] = map_arena(found) if found else private_arena(layout, size)
        return mapped[layout.digest]

    return Host(arena=arena, device=device, threads=boot.threads, listener=listener)


def _sharers(boot: Boot, device: str) -> int:
    """Instances with a model on this GPU, this one included."""
    if boot.device != "auto":
        return sum(worker.replicas for worker in boot.plan.workers.values() if worker.device == boot.device)
    import torch

    return -(-boot.num_engines // torch.cuda.device_count())


def _outlive_nobody(boot: Boot) -> None:
    """Waits for the supervisor's death, then leaves nothing behind, whatever the loop is doing."""
    while True:
        try:
            if not os.read(boot.life_fd, 1):
                break
        except InterruptedError:
            continue
    shutil.rmtree(boot.run_dir, ignore_errors=True)
    os._exit(1)


def _report(boot: Boot, error: Exception) -> None:
    if isinstance(error, FlowInferError):
        cause = error.__cause__
        trace = "".join(traceback.format_exception(cause)) if cause and not isinstance(cause, FlowInferError) else ""
        report = Report(error=error.message, help=error.help, trace=trace[-MAX_TRACE:])
    else:
        report = Report(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-MAX_TRACE:])
    _write(boot, report)


def _write(boot: Boot, report: Report) -> None:
    path = report_path(boot.run_dir, boot.name, boot.generation)
    with contextlib.suppress(OSError), path.open("ab") as file:
        file.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
