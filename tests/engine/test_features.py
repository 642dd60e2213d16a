"""What a draft head reads of the target: the residual stream after chosen layers, as transformers has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from decode_loop import DEVICE, save_random_llama, save_random_v4

from flowinfer.engine import hub
from flowinfer.engine.layout import KVLayout
from flowinfer.engine.models import load_model
from flowinfer.engine.step import Features, StepInput

VOCAB = 96
TOLERANCE = 1e-4 if DEVICE == "cpu" else 5e-3


class Pair(NamedTuple):
    """A model by transformers and by us."""

    theirs: Any
    ours: Any
    layout: KVLayout


def make(save: Any, folder: Path) -> Pair:
    torch.set_num_threads(1)
    theirs = save(folder, VOCAB, 512)
    return Pair(theirs, load_model(folder, dtype="float32", device=DEVICE), hub.describe(folder).layout("float32"))


def run(pair: Pair, tokens: list[int], rows: list[int] | None, features: Features | None) -> Any:
    layout = pair.layout
    count, blocks = len(tokens), layout.blocks_for(len(tokens))
    step = StepInput(
        tokens=torch.tensor(tokens, device=DEVICE),
        positions=torch.arange(count, device=DEVICE),
        query_starts=np.array([0, count], np.int32),
        kv_lens=np.array([count], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logit_rows=None if rows is None else torch.tensor(rows, device=DEVICE),
        features=features,
    )
    with torch.inference_mode():
        return pair.ours.forward(step, torch.zeros(blocks, *layout.block_shape, device=DEVICE))


@pytest.fixture(scope="module", params=[save_random_llama, save_random_v4], ids=["llama", "deepseek_v4"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(request.param, tmp_path_factory.mktemp("model"))


def test_features_are_the_hidden_states_of_the_layers_in_the_order_asked_for(pair: Pair) -> None:
    tokens, rows = torch.randint(3, VOCAB, (150,)).tolist(), [0, 3, 127, 128, 149]
    features = Features((1, 0))
    logits = run(pair, tokens, rows, features)
    # The last of transformers' states is normed already, so that of the last layer is taken behind its last block.
    states: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(pair.theirs.model.layers):
        layer.register_forward_hook(lambda module, given, out, index=index: states.__setitem__(index, _first(out)))
    with torch.no_grad():
        pair.theirs(torch.tensor([tokens]))
    wanted = [states[layer][0, rows] for layer in (1, 0)]
    wanted = [state.mean(1) if state.dim() == 3 else state for state in wanted]
    torch.testing.assert_close(features.joined().cpu(), torch.cat(wanted, 1), rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(logits, run(pair, tokens, rows, None))


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def test_the_output_matrix_makes_logits_of_the_normed_last_layer(tmp_path: Path) -> None:
    pair = make(save_random_llama, tmp_path)
    features = Features((1,))
    logits = run(pair, [5, 6, 7], [2], features)
    normed = pair.theirs.model.norm(features.joined().cpu().clone()).detach().to(DEVICE)
    torch.testing.assert_close(pair.ours.project(normed), logits, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_step_without_logits_gives_no_features(pair: Pair) -> None:
    features = Features((1,))
    assert run(pair, [5, 6, 7], None, features) is None
    assert not features.outputs
