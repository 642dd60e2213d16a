"""Logits of every family equal those of transformers, however the tokens are cut into steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowinfer.engine.models import load, load_model
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.step import StepInput
from flowinfer.errors import ModelError

torch.set_num_threads(1)

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8}),
    "qwen3 moe, some layers dense": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[..., Tensor]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, _oracle(*FAMILIES[request.param], folder)


@pytest.fixture(scope="module", params=["plain", "compiled"])
def pair(
    request: pytest.FixtureRequest, saved: tuple[Path, Callable[..., Tensor]]
) -> tuple[Model, Callable[..., Tensor]]:
    folder, oracle = saved
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "compiled":
            patch.setattr(load, "COMPILED_FROM", 0)
        model = load_model(folder, dtype="float32", device="cpu")
    assert type(model).__name__ == {"plain": "Model", "compiled": "CompiledModel"}[request.param]
    return model, oracle


def _oracle(name: str, settings: dict[str, object], folder: Path) -> Callable[[list[int]], Tensor]:
    """A random transformers model, saved into folder, as a function from ids to logits [T, V]."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**COMMON | settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for parameter in model.parameters():  # norms and biases start at one and zero: nothing would test them
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size="60KB")

    def logits(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0]

    return logits


class Runner:
    """Sequences over one arena: blocks are dealt out of order, unwritten memory is NaN."""

    def __init__(self, model: Model, num_blocks: int = 24) -> None:
        config = model.config
        shape = (num_blocks, config.num_layers, 2, 64, config.num_kv_heads, config.head_dim)
        self.model = model
        self.kv = torch.full(shape, float("nan"), dtype=model.dtype, device=model.device)
        self.free = [int(b) for b in np.random.default_rng(0).permutation(num_blocks)]
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, parts: dict[int, list[int]]) -> dict[int, Tensor]:
        """Runs the next tokens of each sequence; logits [tokens, V] of each."""
        for s, ids in parts.items():
            self.lengths[s] = self.lengths.get(s, 0) + len(ids)
            held = self.blocks.setdefault(s, [])
            held += [self.free.pop() for _ in range(-(-self.lengths[s] // 64) - len(held))]
        logits = self.model.forward(self._input(parts), self.kv)
        assert logits is not None and logits.dtype is torch.float32
        return dict(zip(parts, logits.cpu().split([len(ids) for ids in parts.values()]), strict=True))

    def _input(self, parts: dict[int, list[int]]) -> StepInput:
        counts = [len(ids) for ids in parts.values()]
        lengths = [self.lengths[s] for s in parts]
        positions = [torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
        tables = np.zeros((len(parts), max(len(self.blocks[s]) for s in parts)), np.int32)
        for row, s in enumerate(parts):
            tables[row, : len(self.blocks[s])] = self.blocks[s]
        return StepInput(
            tokens=torch.tensor([token for ids in parts.values() for token in ids]).to(self.model.device),
            positions=torch.cat(positions).to(self.model.device),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            kv_lens=np.array(lengths, np.int32),
            block_tables=tables,
            logit_rows=torch.arange(sum(counts)).to(self.model.device),
        )


def _ids(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(4, 97, count)]


def _close(got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def test_a_whole_prompt_gives_the_logits_of_transformers(pair: tuple[Model, Callable[..., Tensor]]) -> None:
    model, oracle = pair
    _close(Runner(model).step({0: _ids(150)})[0], oracle(_ids(150)))


def test_token_by_token_gives_the_same_logits(pair: tuple[Model, Callable[..., Tensor]]) -> None:
    model, oracle = pair
    runner = Runner(model)
    _close(torch.cat([runner.step({0: [token]})[0] for token in _ids(70)]), oracle(_ids(70)))


@pytest.mark.parametrize("cuts", [[1], [63], [64], [65], [100], [20, 30, 50], [1, 2, 3, 139]])
def test_a_prompt_may_be_cut_anywhere(pair: tuple[Model, Callable[..., Tensor]], cuts: list[int]) -> None:
    model, oracle = pair
    ids, runner = _ids(150), Runner(model)
    parts = np.split(np.array(ids), cuts)
    _close(torch.cat([runner.step({0: part.tolist()})[0] for part in parts]), oracle(ids))


def test_sequences_of_one_step_do_not_mix(pair: tuple[Model, Callable[..., Tensor]]) -> None:
    model, oracle = pair
    _check_mixed_steps(model, oracle)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = _oracle(*FAMILIES[family], tmp_path)
    _check_mixed_steps(load_model(tmp_path, dtype="float32", device="cuda"), oracle)


def _check_mixed_steps(model: Model, oracle: Callable[[list[int]], Tensor]) -> None:
    ids = {s: _ids(length, seed=s) for s, length in enumerate([190, 3, 90, 64, 130])}
    runner = Runner(model)
    got: dict[int, list[Tensor]] = {s: [] for s in ids}
    steps = [
        {0: ids[0][:120], 1: ids[1][:1], 2: ids[2][:20], 3: ids[3][:63]},
        {1: ids[1][1:2], 0: ids[0][120:180], 4: ids[4][:129], 3: ids[3][63:], 2: ids[2][20:85]},
        {2: ids[2][85:90], 0: ids[0][180:185], 1: ids[1][2:], 4: ids[4][129:]},
        {0: ids[0][185:]},
    ]
    for step in steps:
        for s, logits in runner.step(step).items():
            got[s].append(logits)
    for s, parts in got.items():
        _close(torch.cat(parts), oracle(ids[s]))


def test_a_step_without_logit_rows_only_writes_kv(pair: tuple[Model, Callable[..., Tensor]]) -> None:
    model, oracle = pair
    runner, ids = Runner(model), _ids(80)
    runner.lengths[0], runner.blocks[0] = 79, [runner.free.pop(), runner.free.pop()]
    step = runner._input({0: ids[:79]})
    silent = StepInput(step.tokens, step.positions, step.query_starts, step.kv_lens, step.block_tables, None)
    assert model.forward(silent, runner.kv) is None
    _close(runner.step({0: ids[79:]})[0], oracle(ids)[79:])


def _folder(tmp_path: Path, **settings: object) -> Path:
    _oracle("Llama", {}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 4096}, "sliding_window"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight"),
        ({"intermediate_size": 81}, "[80, 48]"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    folder = _folder(tmp_path, **settings)
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="auto", device="cpu")
    assert named in str(caught.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="rms_norm_eps"):
        load_model(folder, device="cpu")


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    oracle = _oracle("Llama", {}, tmp_path)
    got = Runner(load_model(tmp_path, dtype="bfloat16", device="cpu")).step({0: _ids(100)})[0]
    assert (got - oracle(_ids(100))).abs().max() < 0.1 * oracle(_ids(100)).abs().max()


DATA = Path(__file__).parents[1] / "data"
KNOWN = json.loads((DATA / "smollm2_known_answers.json").read_text())


@pytest.mark.model
def test_smollm2_gives_the_known_logits_and_answers(smollm2: Path) -> None:
    model = load_model(smollm2, dtype="float32", device="cpu")
    for answer in KNOWN["answers"].values():
        runner = Runner(model)
        logits = runner.step({0: answer["prompt_ids"]})[0][-1]
        top = logits.topk(5)
        assert top.indices.tolist() == [token for token, _ in answer["top5"]]
        _close(top.values, torch.tensor([value for _, value in answer["top5"]]), 2e-3)
        for token in answer["greedy_f32"][:12]:
            assert int(logits.argmax()) == token
            logits = runner.step({0: [token]})[0][-1]


@pytest.mark.model
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_smollm2_has_the_known_perplexity(smollm2: Path, dtype: str, tolerance: float) -> None:
    """bfloat16 adds noise of 0.002 to the loss of 1,000 tokens, 0.2 % of the perplexity: two of that are allowed."""
    ids = json.loads((DATA / "smollm2_gsm8k_ids.json").read_text())["ids"]
    [(length, known)] = KNOWN["perplexity"].values()
    assert len(ids) == length
    runner, loss = Runner(load_model(smollm2, dtype=dtype, device="cpu"), num_blocks=40), 0.0
    for start in range(0, length, 600):
        logits = runner.step({0: ids[start : start + 600]})[0]
        targets = torch.tensor(ids[start + 1 : start + 601])
        loss += float(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum"))
    assert float(np.exp(loss / (length - 1))) == pytest.approx(known, abs=tolerance)


@pytest.mark.model
def test_smollm2_sliced_into_experts_is_the_dense_model(smollm2: Path, tmp_path: Path) -> None:
    """Four experts over disjoint channels, all chosen with weight 1/4, down projections times four: the dense FFN."""
    _slice_into_experts(smollm2, tmp_path)
    dense, sparse = (load_model(path, dtype="float32", device="cpu") for path in (smollm2, tmp_path))
    ids = next(iter(KNOWN["answers"].values()))["prompt_ids"]
    got, want = Runner(sparse).step({0: ids})[0], Runner(dense).step({0: ids})[0]
    _close(got, want, 2e-4)


def _slice_into_experts(source: Path, folder: Path) -> None:
    """Writes the same function as a Mixtral, in the same dtype: four times a bfloat16 is exact."""
    config = json.loads((source / "config.json").read_text())
    experts = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".mlp." not in name:
            experts[name] = tensor
            continue
        block = name.split(".mlp.")[0] + ".block_sparse_moe"
        experts[f"{block}.gate.weight"] = torch.zeros(4, config["hidden_size"])
        part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[name.split(".")[-2]]
        pieces = (4 * tensor).chunk(4, 1) if part == "w2" else tensor.chunk(4, 0)
        experts |= {f"{block}.experts.{i}.{part}.weight": piece.clone() for i, piece in enumerate(pieces)}
    config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 4}
    config["intermediate_size"] //= 4
    (folder / "config.json").write_text(json.dumps(config))
    save_file(experts, folder / "model.safetensors")
