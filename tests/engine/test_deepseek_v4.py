"""The DeepSeek-V4 family against transformers' own: prompts around every boundary, whole, in pieces, token by token."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.config import parse_config, read_config
from flowinfer.engine.models.deepseek_v4.quant import dequantize, quantize_fp8
from flowinfer.engine.step import StepInput
from flowinfer.errors import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,  # few heads would often give two entries a score of exactly zero, and transformers takes any
    "index_head_dim": 16,
    "index_topk": 8,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "num_hash_layers": 1,
    "max_position_embeddings": 2048,
    "qk_rope_head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}
BLOCKS = 24


def make(folder: Path, **changes: Any) -> Any:
    """A random model of transformers, saved; every parameter is random, or some would never show in the logits."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.5
            parameter.normal_(1.0 if "norm" in name or name.endswith("scale") else 0.0, spread)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(SIZES["vocab_size"])]))
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("v4")
    return make(folder), folder


class Runner:
    """Our model over an arena whose block table is shuffled."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.model: Any = load_model(folder, dtype=dtype)
        self.layout = hub.describe(folder).layout(dtype)
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randperm(BLOCKS, generator=generator).numpy().astype(np.int32)
        # What an earlier tenant left: numbers that must not show.
        shape = (BLOCKS, *self.layout.block_shape)
        self.kv = torch.randn(shape, generator=generator, dtype=torch.float32).to(self.model.dtype) * 9

    def run(self, parts: list[tuple[list[int], int, np.ndarray]]) -> torch.Tensor:
        """Logits of tokens at start, for each (tokens, start, table) in one step."""
        tokens = [token for part, _, _ in parts for token in part]
        positions = [start + i for part, start, _ in parts for i in range(len(part))]
        width = max(len(table) for _, _, table in parts)
        step = StepInput(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            query_starts=np.cumsum([0] + [len(part) for part, _, _ in parts]).astype(np.int32),
            kv_lens=np.array([start + len(part) for part, start, _ in parts], np.int32),
            block_tables=np.stack([np.pad(table, (0, width - len(table))) for _, _, table in parts]),
            logit_rows=torch.arange(len(tokens)),
        )
        with torch.inference_mode():
            return self.model.forward(step, self.kv)

    def pieces(self, tokens: list[int], cuts: list[int]) -> torch.Tensor:
        edges = [0, *cuts, len(tokens)]
        return torch.cat([self.run([(tokens[a:b], a, self.table)]) for a, b in pairwise(edges) if b > a])


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=True).logits[0]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 127, 128, 129, 255, 256, 1000])
def test_logits_of_whole_prompts(pair: tuple[Any, Path], count: int) -> None:
    model, folder = pair
    tokens = some_tokens(count, count)
    assert_close(Runner(folder).pieces(tokens, []), expected(model, tokens))


def test_any_cut_gives_the_same(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    tokens = some_tokens(262)
    wanted = expected(model, tokens)
    for cuts in ([1], [3, 4, 5], [126], [127, 129], [128], [131, 250], [255, 256, 257], list(range(7, 262, 19))):
        assert_close(Runner(folder).pieces(tokens, cuts), wanted)


def test_token_by_token(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    tokens = some_tokens(135)
    assert_close(Runner(folder).pieces(tokens, list(range(1, 135))), expected(model, tokens))


def test_sequences_of_one_step_dont_touch(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    runner = Runner(folder)
    tables = runner.table.reshape(4, 6)
    prompts = [some_tokens(count, count) for count in (150, 4, 301, 37)]
    cuts = (140, 3, 299, 36)
    runner.run([(p[:c], 0, t) for p, c, t in zip(prompts, cuts, tables, strict=True)])
    found = runner.run([(p[c:], c, t) for p, c, t in zip(prompts, cuts, tables, strict=True)])
    wanted = torch.cat([expected(model, p)[c:] for p, c in zip(prompts, cuts, strict=True)])
    assert_close(found, wanted)


@pytest.mark.parametrize("start", [117, 120, 123, 127])
def test_rejected_drafts_leave_no_trace(pair: tuple[Any, Path], start: int) -> None:
    """Eight wrong drafts are run and taken back, across the end of a group and of a block, at every step."""
    model, folder = pair
    tokens = some_tokens(start + 16)
    runner = Runner(folder)
    rows = [runner.run([(tokens[:start], 0, runner.table)])]
    for at in range(start, len(tokens)):
        wrong = some_tokens(8, seed=at)
        rows.append(runner.run([([tokens[at], *wrong], at, runner.table)])[:1])
    assert_close(torch.cat(rows), expected(model, tokens))


def test_yarn_plain_windows_and_another_window_size(tmp_path: Path) -> None:
    model = make(tmp_path, rope_parameters=YARN, sliding_window=20, index_topk=512)
    tokens = some_tokens(300)
    assert_close(Runner(tmp_path).pieces(tokens, [150]), expected(model, tokens))


def test_bfloat16_stays_near(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    tokens = some_tokens(200)
    found, wanted = Runner(folder, "bfloat16").pieces(tokens, [100]), expected(model, tokens)
    assert (found - wanted).norm() / wanted.norm() < 0.1


def test_bytes_of_the_layout_are_those_of_the_arena(pair: tuple[Any, Path]) -> None:
    runner = Runner(pair[1])
    assert runner.kv[0].nbytes == runner.layout.block_bytes
    assert runner.layout.block_tokens == 128
    rows = {part.name: (part.rows, part.width) for part in runner.layout.sections}
    assert rows["1.entries"] == (32, 32) and rows["1.index"] == (32, 16) and rows["2.entries"] == (1, 32)
    assert set(runner.layout.group_bytes()) == {"window", "compressed", "state"}


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_block_scaled_experts_load(pair: tuple[Any, Path], tmp_path: Path, kind: str) -> None:
    """The same logits as from the numbers that the quantized tensors stand for."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    stored = load_file(pair[1] / "model.safetensors")
    config = json.loads((pair[1] / "config.json").read_text())
    dense, small = dict(stored), dict(stored)
    for name in [name for name in stored if ".experts." in name]:
        if kind == "fp8":
            weight, scale = quantize_fp8(stored[name])
        else:
            rows, columns = stored[name].shape
            weight = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            scale = torch.exp2(torch.randint(-4, -1, (rows, -(-columns // 32))).float())
        small[name], small[name.replace(".weight", ".scale")] = weight, scale.to(torch.float8_e8m0fnu)
        dense[name] = dequantize(weight, scale)
    for folder, tensors, quantized in ((plain, dense, None), (packed, small, {"quant_method": "fp8"})):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    tokens = some_tokens(40)
    torch.testing.assert_close(Runner(packed).pieces(tokens, []), Runner(plain).pieces(tokens, []))


def mixed(stored: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Routed experts in FP4, the shared one in FP8 with float32 scales, attention in FP8 with UE8M0; and plain."""
    torch.manual_seed(1)
    packed, plain = dict(stored), dict(stored)
    for name in stored:
        if ".experts." in name:
            rows, columns = stored[name].shape
            weight = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            scale = torch.exp2(torch.randint(-4, -1, (rows, -(-columns // 32))).float()).to(torch.float8_e8m0fnu)
        elif name.endswith(("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight")):
            weight, scale = quantize_fp8(stored[name], side=16)
            scale = scale.to(torch.float8_e8m0fnu)
        elif "shared_experts" in name:
            weight, scale = quantize_fp8(stored[name], side=16)
        else:
            continue
        if weight.shape[1] * (2 if weight.dtype == torch.int8 else 1) != stored[name].shape[1]:
            continue  # an odd number of columns can't be packed in pairs
        packed[name] = weight
        packed[name.replace(".weight", ".weight_scale_inv" if "shared" in name else ".scale")] = scale
        plain[name] = dequantize(weight, scale, (16, 16))
    return packed, plain


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], block: int = 16) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    quantized = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    return folder


def test_all_formats_at_once_give_the_logits_of_their_numbers(pair: tuple[Any, Path], tmp_path: Path) -> None:
    stored = load_file(pair[1] / "model.safetensors")
    config = json.loads((pair[1] / "config.json").read_text())
    packed, plain = mixed(stored)
    folder = saved(tmp_path / "packed", packed, config)
    found = hub.stored(folder, read_config(folder))
    assert set(found) == {"plain", "fp8", "fp4"}
    assert found["fp4"] == sum(tensor.numel() for name, tensor in stored.items() if ".experts." in name)
    tokens = some_tokens(40)
    wanted = Runner(saved(tmp_path / "plain", plain, config)).pieces(tokens, [])
    torch.testing.assert_close(Runner(folder).pieces(tokens, []), wanted)


@pytest.mark.parametrize("what", ["no scales", "wrong shape", "wrong block", "unknown dtype"])
def test_check_and_load_refuse_the_same_tensor(pair: tuple[Any, Path], tmp_path: Path, what: str) -> None:
    config = json.loads((pair[1] / "config.json").read_text())
    tensors, _ = mixed(load_file(pair[1] / "model.safetensors"))
    name = next(name for name in tensors if name.endswith("wq_b.weight"))
    scale = name.replace(".weight", ".scale")
    if what == "no scales":
        del tensors[scale]
    elif what == "wrong shape":
        tensors[scale] = torch.ones(5, 7)
    elif what == "unknown dtype":
        tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int16)
    folder = saved(tmp_path / "bad", tensors, config, block=128 if what == "wrong block" else 16)
    with pytest.raises(ModelError) as checked:
        hub.stored(folder, read_config(folder))
    with pytest.raises(ModelError) as loaded:
        load_model(folder)
    assert checked.value.help == loaded.value.help != ""
    if what != "wrong block":  # there every FP8 matrix is at fault, and the two come to another one first
        assert name in checked.value.message and name in loaded.value.message


def test_fp8_round_trip_error_is_that_of_three_bits() -> None:
    weight = torch.randn(200, 300)
    back = dequantize(*quantize_fp8(weight))
    assert (back - weight).norm() / weight.norm() < 0.04


def test_fp4_values_by_the_format() -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76] * 4], dtype=torch.uint8)
    wanted = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 4]) * 2
    assert torch.equal(dequantize(codes, torch.tensor([[2.0]])), wanted)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scoring_func", "softmax"),
        ("layer_types", ["full_attention"] * 4),
        ("quantization_config", {"quant_method": "awq"}),
    ],
)
def test_what_would_change_results_is_refused(pair: tuple[Any, Path], field: str, value: Any) -> None:
    raw = json.loads((pair[1] / "config.json").read_text())
    with pytest.raises(ModelError, match=field):
        parse_config(raw | {field: value})
