"""`flowinfer batch`: answers a file of requests with the pipeline in this process, and survives being killed."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flowinfer.cli.journal import Journal
from flowinfer.errors import FlowInferError, RequestError
from flowinfer.message import Call, Piece
from flowinfer.serve.openai import batch as lines
from flowinfer.serve.openai.job import Job, Limits

if TYPE_CHECKING:
    from flowinfer.runtime.local import LocalService

Key = str | int  # custom_id, or the number of an input line that has none


@click.command()
@click.argument("file", type=click.Path())
@click.option("-i", "--input", "source", required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--in-flight", type=click.IntRange(min=1), default=64, show_default=True, help="Requests at a time.")
@click.option("--overlay", "overlays", multiple=True, type=click.Path(), help="Lay this file over FILE.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set one value of FILE.")
@click.option("--allow-local", is_flag=True, help="Let FILE run code of local files.")
def batch(
    file: str,
    source: Path,
    output: Path,
    in_flight: int,
    overlays: tuple[str, ...],
    sets: tuple[str, ...],
    allow_local: bool,
) -> None:
    """Answer the requests of a file in OpenAI's batch format, offline, with the pipeline of FILE.

    Run again after a kill: lines that are in the output are skipped, the others answered. Output is in any order.
    """
    from flowinfer.graph import load_plan
    from flowinfer.runtime.local import LocalService
    from flowinfer.runtime.models import fetch_models
    from flowinfer.serve.gateway import GatewayConfig

    plan = load_plan(file, overlays, sets, allow_local)
    keys = scan(source)
    journal = Journal(output)
    try:
        _check_same_batch(journal, keys, source)
        fetch_models(plan)
        config = GatewayConfig.of(plan)
        limits = replace(Limits.of(config), max_requests=max(in_flight, 1))
        console = Console(stderr=True)
        with console.status(f"Loading {plan.name}"):
            service = LocalService(plan)
            service.open()
        service.start()
        try:
            failed = Run(service, journal, limits, in_flight).run(source, len(keys), console)
        finally:
            service.close()
    finally:
        journal.close()
    console.print(f"{len(keys)} lines in {output}; in this run {failed} failed.")


def scan(source: Path) -> list[Key]:
    """What names each line of the input. Raises FlowInferError when two lines share a custom_id."""
    keys = [key for key, _ in read(source)]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        numbers = [number for number, key in enumerate(keys, start=1) if key == twice[0]]
        more = f", and {len(twice) - 1} more" if len(twice) > 1 else ""
        where = " and ".join(str(number) for number in numbers[:2])
        message = f"{source}: custom_id {twice[0]!r} stands in entries {where}{more}."
        raise FlowInferError(message, help="Give each request a custom_id of its own.")
    return keys


def read(source: Path) -> Iterator[tuple[Key, lines.BatchLine | RequestError]]:
    """The lines of the input with their keys; empty ones are passed over."""
    with source.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                line = lines.read_line(text)
            except RequestError as error:
                yield number, error
            else:
                yield line.custom_id, line


class Run:
    """One run over an input: keeps up to in_flight calls open, and writes what has ended in groups."""

    def __init__(self, service: LocalService, journal: Journal, limits: Limits, in_flight: int) -> None:
        self._service = service
        self._journal = journal
        self._limits = limits
        self._in_flight = in_flight
        self._ended: queue.SimpleQueue[tuple[_Open, RequestError | None]] = queue.SimpleQueue()
        self._num_open = 0
        self._num_failed = 0
        self._written: list[bytes] = []

    def run(self, source: Path, total: int, console: Console) -> int:
        """Answers what isn't in the journal yet; the number of lines that failed."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("Answering", total=total, completed=len(self._journal.done))
            for key, line in read(source):
                if key in self._journal.done:
                    continue
                self._begin(key, line)
                progress.advance(task, self._collect(until=self._in_flight))
            while self._num_open or self._written:
                progress.advance(task, self._collect(until=1))
        return self._num_failed

    def _begin(self, key: Key, line: lines.BatchLine | RequestError) -> None:
        if isinstance(line, RequestError):
            self._refused(lines.unreadable(int(key), line))
            return
        try:
            job = lines.job_of(line, self._limits)
        except RequestError as error:
            self._refused(lines.failure(line.custom_id, "", error))
            return
        request = _Open(line.custom_id, job, self._ended)
        self._num_open += len(job.calls)
        for call in job.calls:
            self._service.submit(call, request.take(call))

    def _refused(self, text: bytes) -> None:
        self._num_failed += 1
        self._written.append(text)

    def _collect(self, until: int) -> int:
        """Waits until fewer than `until` calls are open, writes what has ended; the number of lines written."""
        while self._num_open >= until or not self._ended.empty():
            if not self._take(wait=self._num_open >= until):
                break
        count = len(self._written)
        if count:
            self._journal.append(self._written)
            self._written.clear()
        return count

    def _take(self, *, wait: bool) -> bool:
        try:
            request, error = self._ended.get(timeout=1.0) if wait else self._ended.get_nowait()
        except queue.Empty:
            if self._service.error is not None:
                raise FlowInferError(f"The pipeline broke: {self._service.error}") from self._service.error
            return wait
        self._num_open -= len(request.job.calls)
        if error is None:
            self._written.append(lines.success(request.custom_id, request.job, request.pieces))
        else:
            self._refused(lines.failure(request.custom_id, request.job.id, error))
        return True


class _Open:
    """A request under way. Fed in the pipeline's thread; goes to `ended` once, when all its calls have ended."""

    def __init__(self, custom_id: str, job: Job, ended: queue.SimpleQueue[tuple[_Open, RequestError | None]]) -> None:
        self.custom_id = custom_id
        self.job = job
        self.pieces: list[list[Piece]] = [[] for _ in job.calls]
        self._indices = {call.id: index for index, call in enumerate(job.calls)}
        self._num_left = len(job.calls)
        self._error: RequestError | None = None
        self._ended = ended

    def take(self, call: Call) -> Callable[[Piece | RequestError], None]:
        """What the service calls with news of this call."""
        return lambda item: self._take(self._indices[call.id], item)

    def _take(self, index: int, item: Piece | RequestError) -> None:
        if isinstance(item, Piece):
            self.pieces[index].append(item)
        else:
            self._error = item
        if isinstance(item, RequestError) or item.finish is not None:
            self._num_left -= 1
            if not self._num_left:
                self._ended.put((self, self._error))


def _check_same_batch(journal: Journal, keys: list[Key], source: Path) -> None:
    foreign = journal.done.difference(keys)
    if foreign:
        example = min(map(str, foreign))
        message = f"{journal.path} holds answers to requests that aren't in {source}, {example!r} for one."
        raise FlowInferError(message, help="Give another file with -o.")
