"""Training that goes on: from what was shipped or from a run's folder, for the model and for its draft head."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from flowinfer.engine.draft.head import read
from flowinfer.engine.models.deepseek_v4.config import parse_v4
from flowinfer.engine.sources import HEADS
from flowinfer.errors import ModelError
from flowinfer.train import checkpoint, export, heads, run
from flowinfer.train.model import TrainableV4
from flowinfer.train.targets import MiniTarget

TINY = {
    **run.MINI,
    "vocab_size": 96, "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "head_dim": 32, "q_lora_rank": 16, "n_routed_experts": 4, "o_lora_rank": 16, "index_n_heads": 2,
    "index_head_dim": 16, "qk_rope_head_dim": 8, "layer_types": [run.SLIDING, run.SPARSE, run.HEAVY],
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "hc_sinkhorn_iters": 5,
}  # fmt: skip
CHAT = [0, *range(3, 60), 1]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def vocabulary(folder: Path, *words: str) -> None:
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")).save(str(folder / "tokenizer.json"))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """What `run` writes, and its export in `shipped`."""
    folder = tmp_path / "run"
    folder.mkdir()
    run.save_shards(TrainableV4(parse_v4(TINY, eos=None)).checkpoint(), folder, most=60_000)
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "log.json").write_text("{}")
    vocabulary(folder, "a", "b")
    export.export(folder, folder / "tokenizer.json", tmp_path / "shipped", source="test")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, times in (("train", 60), ("held_out", 12)):
        starts = np.arange(times, dtype=np.uint32) * len(CHAT)
        sizes, kinds = np.full(times, 6, np.uint16), np.zeros(times, np.uint8)
        tokens = np.array(CHAT * times, np.uint16)
        np.savez(folder / f"{name}.npz", tokens=tokens, starts=starts, prompt_len=sizes, kind=kinds)
    vocabulary(folder, "a", "b")
    return folder


def test_a_target_is_the_same_from_a_run_and_as_shipped(trained: Path) -> None:
    one, other = (MiniTarget(path, "cpu", torch.float32).model for path in (trained, trained.parent / "shipped"))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0, msg=name)


def test_what_isnt_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("start", ["run", "shipped"])
def test_a_run_begins_where_another_ended(
    start: str, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    options = [f"--data={data}", f"--out={out}", f"--init={tmp_path / start}", "--steps=1", "--batch=1", "--size=256"]
    monkeypatch.setattr(sys, "argv", ["run", *options])
    run.main()
    assert json.loads((out / "log.json").read_text())["run"]["lr"] == run.LR_ON < run.LR
    config, after = checkpoint.read(out)
    assert config == TINY
    before = checkpoint.read(tmp_path / start)[1]
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, before[name], rtol=0.01, atol=1e-3, msg=name)


def test_ids_of_another_vocabulary_are_refused(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary(data, "a", "c")
    monkeypatch.setattr(sys, "argv", ["run", f"--data={data}", f"--out={tmp_path / 'out'}", f"--init={trained}"])
    with pytest.raises(ModelError, match="another vocabulary"):
        run.main()


def test_a_head_goes_on_with_the_shipped_model(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of the package, one step further."""
    before, tensors = read(HEADS["flowinfer-mini"])
    sizes = ["--steps=1", "--batch=2", "--each=2", "--measure=8"]
    names = [
        "--target=mini",
        "--model=flowinfer-mini",
        f"--init={HEADS['flowinfer-mini']}",
        f"--chats={data}/train.npz",
    ]
    monkeypatch.setattr(sys, "argv", ["heads", *names, f"--out={tmp_path / 'head'}", *sizes])
    heads.main()
    assert json.loads((tmp_path / "head" / "report.json").read_text())["run"]["lr"] == heads.LR_ON < heads.LR
    config, after = read(tmp_path / "head" / "draft.safetensors")
    assert (config.target, config.feature_layers) == (before.target, before.feature_layers)
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0.01, atol=1e-3, msg=name)


def test_a_head_of_other_sizes_is_refused(trained: Path) -> None:
    target = MiniTarget(trained, "cpu", torch.float32)
    with pytest.raises(ModelError, match="other sizes"):
        heads.begun(target, HEADS["flowinfer-mini"])
    assert heads.begun(target, None).config == target.config
