"""`flowinfer cache`: reads beside a service, changes nothing while one runs, finds what is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowinfer.cache.disk.store import DiskStore, StoreSettings
from flowinfer.cli import main

SIZE, MIB = 5000, 1 << 20


def store(folder: Path) -> DiskStore:
    return DiskStore(StoreSettings(path=folder, size=64 * MIB, segment=MIB, sweep_s=1e9))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = store(tmp_path / "kv")
    for number in range(6):
        cls, tenant = ("agent", "alice") if number < 2 else ("chat", "")
        block = (bytes([number]) * 16, memoryview(bytearray([number]) * SIZE))
        made.put([block], namespace="n", cls=cls, tenant=tenant).result()
    made.close()
    yield tmp_path / "kv"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, words)])


def there(folder: Path) -> list[int]:
    opened = store(folder)
    found = opened.get([bytes([n]) * 16 for n in range(6)], [memoryview(bytearray(SIZE)) for _ in range(6)], "n")
    opened.close()
    return [number for number, is_there in enumerate(found) if is_there]


def test_stats_and_ls_read_beside_a_running_service(folder: Path) -> None:
    running = store(folder)
    try:
        stats, ls = run("stats", "--path", folder), run("ls", "--path", folder, "--class", "agent")
        removal = run("rm", "--path", folder, "--all")
    finally:
        running.close()
    assert stats.exit_code == ls.exit_code == 0
    assert "alice" in stats.output and "agent" in stats.output
    assert [line.split()[0] for line in ls.output.splitlines()] == ["00" * 16, "01" * 16]
    assert removal.exit_code == 1 and "a service uses the cache" in removal.output
    assert there(folder) == list(range(6))


def test_rm_deletes_a_tenant_for_good(folder: Path) -> None:
    assert "2 blocks deleted" in run("rm", "--path", folder, "--tenant", "alice").output
    for index in folder.glob("index*"):
        index.unlink()
    assert there(folder) == [2, 3, 4, 5]


def test_rm_asks_which(folder: Path) -> None:
    assert run("rm", "--path", folder).exit_code == 2 and there(folder) == list(range(6))


def test_verify_names_the_damaged_and_rm_deletes_them(folder: Path) -> None:
    assert run("verify", "--path", folder).exit_code == 0
    (path,) = [p for p in folder.glob("*.seg") if bytes([3]) * SIZE in p.read_bytes()]
    data = path.read_bytes()
    path.write_bytes(data.replace(bytes([3]) * SIZE, bytes([3]) * (SIZE - 1) + b"x"))
    found = run("verify", "--path", folder)
    assert found.exit_code == 1 and "03" * 16 in found.output and "checksum" in found.output
    assert "1 blocks deleted" in run("rm", "--path", folder, "--damaged").output
    assert there(folder) == [0, 1, 2, 4, 5]


def test_an_export_is_taken_in_elsewhere(folder: Path, tmp_path: Path) -> None:
    tar, other = tmp_path / "kv.tar", tmp_path / "other"
    assert "6 blocks written" in run("export", "--path", folder, tar).output
    assert "6 blocks taken in" in run("import", "--path", other, "--size", "64MiB", tar).output
    assert there(other) == list(range(6))


def test_a_folder_without_a_cache_is_told(tmp_path: Path) -> None:
    result = run("stats", "--path", tmp_path)
    assert result.exit_code == 1 and "there is no disk cache" in result.output


def test_what_is_no_export_is_told_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    result = run("import", "--path", folder, tmp_path / "junk")
    assert result.exit_code == 1 and "isn't an export" in result.output and there(folder) == list(range(6))
