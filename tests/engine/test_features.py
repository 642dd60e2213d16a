"""What a draft head reads of the target: the residual stream after chosen layers, as transformers has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.step import Features, StepInput

sys.path.insert(0, str(Path(__file__).parent))
VOCAB = 96


def llama(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_hidden_layers=4, initializer_range=0.3, max_position_embeddings=512, **sizes)
    )
    model.save_pretrained(folder)
    return model


def deepseek(folder: Path) -> Any:
    from test_deepseek_v4 import make

    return make(folder)


def run(model: Any, tokens: list[int], rows: list[int] | None, features: Features | None) -> Any:
    layout = hub.describe(model.folder).layout("float32")
    count, blocks = len(tokens), layout.blocks_for(len(tokens))
    step = StepInput(
        tokens=torch.tensor(tokens),
        positions=torch.arange(count),
        query_starts=np.array([0, count], np.int32),
        kv_lens=np.array([count], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logit_rows=None if rows is None else torch.tensor(rows),
        features=features,
    )
    with torch.inference_mode():
        return model.forward(step, torch.zeros(blocks, *layout.block_shape))


@pytest.fixture(scope="module", params=[llama, deepseek], ids=["llama", "deepseek_v4"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    theirs = request.param(folder).eval()
    ours = load_model(folder, dtype="float32")
    ours.folder = folder  # type: ignore[attr-defined]
    return theirs, ours


def test_features_are_the_hidden_states_of_the_layers_in_the_order_asked_for(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    tokens, rows = torch.randint(3, VOCAB, (150,)).tolist(), [0, 3, 127, 128, 149]
    features = Features((2, 0))
    logits = run(ours, tokens, rows, features)
    with torch.no_grad():
        states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    wanted = [states[layer + 1][0, rows] for layer in (2, 0)]
    wanted = [state.mean(1) if state.dim() == 3 else state for state in wanted]
    torch.testing.assert_close(features.joined(), torch.cat(wanted, 1), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits, run(ours, tokens, rows, None))


def test_the_output_matrix_makes_logits_of_the_normed_last_layer(tmp_path: Path) -> None:
    theirs = llama(tmp_path)
    ours = load_model(tmp_path, dtype="float32")
    ours.folder = tmp_path  # type: ignore[attr-defined]
    features = Features((3,))
    logits = run(ours, [5, 6, 7], [2], features)
    normed = theirs.model.norm(features.joined().clone())
    torch.testing.assert_close(ours.project(normed.detach()), logits, rtol=1e-4, atol=1e-4)


def test_a_step_without_logits_gives_no_features(pair: tuple[Any, Any]) -> None:
    features = Features((1,))
    assert run(pair[1], [5, 6, 7], None, features) is None
    assert not features.outputs
