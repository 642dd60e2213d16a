"""Logs in the run directory: which stage, how much, and what can't be written."""

from __future__ import annotations

import errno
import io
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowinfer.observe import logs
from flowinfer.observe.logs import Follower, LogFile, now, read

Make = Callable[..., logging.Logger]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A logger of an instance that logs into tmp_path; `logger.handlers[0]` is its LogFile."""
    made: list[logging.Logger] = []

    def begin(worker: str = "decode.0", generation: int = 1) -> logging.Logger:
        logger = logging.Logger("flowinfer.stages.some")
        logger.addHandler(LogFile(tmp_path, worker, generation))
        made.append(logger)
        return logger

    yield begin
    for logger in made:
        logger.handlers[0].close()


def test_a_line_knows_its_stage_and_its_error(make: Make, tmp_path: Path) -> None:
    logger = make(generation=3)
    now.stage = "verify"
    try:
        raise RuntimeError("that can't be")
    except RuntimeError:
        logger.exception("step %d broke", 7)
    finally:
        now.stage = ""
    (line,) = read(tmp_path)
    assert (line.worker, line.generation, line.stage, line.level) == ("decode.0", 3, "verify", "ERROR")
    assert line.text == "step 7 broke"
    assert line.trace.endswith("RuntimeError: that can't be")


def test_threads_have_stages_of_their_own(make: Make, tmp_path: Path) -> None:
    logger = make()
    now.stage = "loop"

    def work() -> None:
        now.stage = "pool"
        logger.warning("from the pool")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    logger.warning("from the loop")
    now.stage = ""
    assert [line.stage for line in read(tmp_path)] == ["pool", "loop"]


def test_a_flood_is_bounded_and_what_was_dropped_is_told(make: Make, tmp_path: Path) -> None:
    logger = make()
    handler = logger.handlers[0]
    assert isinstance(handler, LogFile)
    for number in range(10_000):
        logger.warning("flood %d", number)
    kept = len(read(tmp_path))
    assert logs.BURST <= kept < logs.BURST + 1_000, "what came faster was dropped"
    assert handler.num_dropped == 10_000 - kept
    handler._balance = 1.0
    logger.warning("after it")
    assert sum(line.dropped for line in read(tmp_path)) == 10_000 - kept


def test_files_stay_within_their_size_and_keep_the_newest(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 4_096)
    logger = make()
    for number in range(500):
        logger.warning("number %d", number)
    assert sum(path.stat().st_size for path in (tmp_path / logs.FOLDER).iterdir()) <= 4_400 * (logs.OLD_FILES + 1)
    texts = [line.text for line in read(tmp_path)]
    assert texts == [f"number {number}" for number in range(500 - len(texts), 500)]


def test_a_full_disk_loses_lines_not_the_service(make: Make, tmp_path: Path) -> None:
    logger = make()
    handler = logger.handlers[0]
    assert isinstance(handler, LogFile)
    whole, handler.stream = handler.stream, _Full()
    logger.warning("lost")
    handler.stream = whole
    logger.warning("kept")
    assert handler.num_dropped == 1
    assert [(line.text, line.dropped) for line in read(tmp_path)] == [("kept", 1)]


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_who_follows_sees_each_line_once_across_rotations(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 2_000)
    logger, follower = make(), Follower(tmp_path)
    logger.warning("before")
    follower.skip()
    seen: list[str] = []
    for number in range(60):
        logger.warning("number %d", number)
        if number % 5 == 0:
            seen += [line.text for line in follower.take()]
    seen += [line.text for line in follower.take()]
    assert seen == [f"number {number}" for number in range(60)]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / logs.FOLDER).mkdir()
    follower, path = Follower(tmp_path), tmp_path / logs.FOLDER / "a.0.jsonl"
    path.write_bytes(b'{"at":1,"level":"INFO","worker":"a.0","te')
    assert follower.take() == [] and read(tmp_path) == []
    path.write_bytes(path.read_bytes() + b'xt":"x"}\n')
    assert [line.text for line in follower.take()] == ["x"]
