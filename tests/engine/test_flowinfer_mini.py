"""The model that comes with the package: whole, small enough, found without a network, and it writes English."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decode_loop import Service, prompt

from flowinfer.engine import heads, hub, manifest
from flowinfer.engine.sources import BUNDLED, HEADS
from flowinfer.errors import ModelError
from flowinfer.stages.recipe_tokenize.told import told_by
from flowinfer.text.deepseek import DeepSeekRecipe
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

NAME = "flowinfer-mini"
MOST_BYTES = 24_000_000


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def encoded(tokenizer: TextTokenizer, text: str) -> list[int]:
    """A chat of one turn, ready to be answered."""
    segments = tokenizer.render([{"role": "user", "content": text}], None, add_generation_prompt=True)
    return tokenizer.encode_segments(segments).tolist()


def test_it_is_there_whole_and_small() -> None:
    folder = hub.resolve(NAME)
    assert hub.pull(NAME) == folder
    assert hub.verify(NAME)
    assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    info = hub.describe(folder)
    assert 12e6 < info.num_params < 20e6
    assert info.layout().block_tokens == 128


def test_with_its_draft_head_it_stays_small() -> None:
    folders = hub.resolve(NAME), HEADS[NAME].parent
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= MOST_BYTES


@pytest.mark.parametrize("folder", [*BUNDLED.values(), *(head.parent for head in HEADS.values())], ids=lambda f: f.name)
def test_what_ships_is_what_its_manifest_says(folder: Path) -> None:
    assert manifest.matches(folder)
    found = manifest.read(folder)
    assert found is not None
    assert set(found["files"]) == {path.name for path in folder.iterdir()} - {manifest.NAME}
    assert all(entry["size"] == (folder / name).stat().st_size for name, entry in found["files"].items())


def test_its_head_was_trained_for_these_weights() -> None:
    assert heads.read(HEADS[NAME]).digest == manifest.digest(hub.resolve(NAME))


def test_a_damaged_copy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in hub.resolve(NAME).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setitem(BUNDLED, NAME, folder)
    assert hub.verify(NAME)
    (folder / "config.json").write_text("{}")
    assert not hub.verify(NAME)
    with pytest.raises(ModelError, match="damaged"):
        hub.discard(NAME)


def test_its_prompts_look_like_the_large_models() -> None:
    tokenizer = load_tokenizer(hub.resolve(NAME))
    text = "Hi <｜Assistant｜> there"
    ids = encoded(tokenizer, text)
    assert ids[:2] == [0, 3] and ids[-2:] == [4, 7]
    assert ids.count(4) == 1, "what a user writes is never a control token"
    assert tokenizer.decode(ids[2:-2]) == text


def test_it_writes_english_through_the_stages() -> None:
    tokenizer = load_tokenizer(hub.resolve(NAME))
    ids = encoded(tokenizer, "Write a story with simple words about a brave mouse.")
    service = Service(Path(NAME), num_blocks=8, draft="ngram")
    service.send(prompt("story", ids, max_tokens=40))
    answer = tokenizer.decode(service.finish(["story"])["story"])
    assert answer.isascii() and {"the", "was"} <= set(answer.split())


def test_the_makers_recipe_gives_its_prompts_too() -> None:
    pytest.importorskip("deepseek_recipe")
    tokenizer = load_tokenizer(hub.resolve(NAME))
    recipe = tokenizer.with_recipe("deepseek-v4")
    recipe.check_templates()
    chat = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "A"},
    ]
    for thinking in (False, True):
        own = tokenizer.encode_segments(tokenizer.render(chat, thinking=thinking)).tolist()
        effort = "low" if thinking else "none"  # the others put a preamble first
        assert recipe.encode_segments(recipe.render(chat, reasoning_effort=effort)).tolist() == own


def test_a_deepseek_that_brings_no_template_is_told_by_its_makers_recipe(tmp_path: Path) -> None:
    for path in hub.resolve(NAME).iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for folder, recipe in ((tmp_path, True), (hub.resolve(NAME), False)):
        formats = told_by(load_tokenizer(folder), None, "auto").templates
        assert isinstance(formats["default"], DeepSeekRecipe) == recipe
    assert not told_by(load_tokenizer(tmp_path), None, "template").templates


def test_a_request_holds_what_models_show_says() -> None:
    service = Service(Path(NAME), num_blocks=8)
    service.send(prompt("one", range(20, 300), max_tokens=40))
    while not len(service.decode.batch):
        service.turn()
    engine = service.decode.engine
    held = engine.held["one"]
    length = len(held.blocks) * engine.layout.block_tokens
    assert (
        len(held.blocks) * engine.kv[0].nbytes
        == engine.layout.request_bytes(280)
        == engine.layout.request_bytes(length)
    )
    assert engine.layout.token_bytes * engine.layout.block_tokens == engine.kv[0].nbytes
