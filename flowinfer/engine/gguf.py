"""Turns a GGUF file of the llama family into a Hugging Face folder; the gguf package reads and dequantizes.

Imports torch only while converting. Weights are rounded to bfloat16, the dtype that the model was published in: the
known answers were computed from these rounded weights and match to the third decimal. Storing float32 would move logits
by 0.1 and double the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flowinfer.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

Progress = Callable[[int, int], None]  # tensors done, tensors in all
Floats = npt.NDArray[np.float32]

_CONTROL = 3  # token types of the GGUF specification
_USER_DEFINED = 4
_QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path, *, progress: Progress | None = None) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer of source into folder.

    folder must exist and be empty. Raises ModelError naming the architecture, tokenizer or tensor type not known here.
    """
    import torch
    from safetensors.torch import save_file

    reader = _open(source)
    fields = _Fields(reader, source)
    config = _config(fields)
    values = _tensors(reader, config, progress)
    tensors = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in values}
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    _write_tokenizer(fields, folder)


class _Fields:
    """Metadata by name, with an error that says what is missing."""

    def __init__(self, reader: GGUFReader, source: Path) -> None:
        self._reader = reader
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def need(self, name: str, *known: object) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"{self.source}: metadata {name} is missing.")
        if known and value not in known:
            raise ModelError(f"{self.source}: {name} {value!r} isn't supported.", help=f"Supported: {known}.")
        return value


def _open(source: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{source} isn't a readable GGUF file: {error}.", help="Is the download complete?") from None


def _config(fields: _Fields) -> dict[str, Any]:
    fields.need("general.architecture", "llama")
    if fields.get("llama.rope.scaling.type", "none") != "none" or fields.get("llama.expert_count"):
        raise ModelError(f"{fields.source}: rope scaling or experts in a GGUF aren't supported.", help="Use a folder.")
    heads, hidden = fields.need("llama.attention.head_count"), fields.need("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields.need("llama.feed_forward_length"),
        "num_hidden_layers": fields.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields.need("llama.context_length"),
        "rms_norm_eps": float(f"{fields.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "vocab_size": len(fields.need("tokenizer.ggml.tokens")),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _tensors(reader: GGUFReader, config: dict[str, Any], progress: Progress | None) -> Iterator[tuple[str, Floats]]:
    from gguf import dequantize

    for done, tensor in enumerate(reader.tensors, 1):
        if tensor.tensor_type.name not in _QUANTIZATIONS:
            raise ModelError(
                f"tensor {tensor.name} is {tensor.tensor_type.name}.", help=f"Supported: {', '.join(_QUANTIZATIONS)}."
            )
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        restored = _restore_rows(tensor.name, values, config)
        yield _rename(tensor.name), np.require(restored, requirements=["C", "W"])
        if progress:
            progress(done, len(reader.tensors))


def _rename(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    kind = part.removesuffix(".weight")
    if prefix != "blk" or kind not in _LAYER_NAMES:
        raise ModelError(f"tensor {name} has no place in a Llama model.")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _restore_rows(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """llama GGUF files interleave the halves of each head of q and k, for a rope over neighbours; ours pairs halves."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return values
    rows, width = values.shape
    return values.reshape(count, rows // count // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_tokenizer(fields: _Fields, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE whose numbers are split into digits first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields.need("tokenizer.ggml.model", "gpt2")
    fields.need("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    types: list[int] = fields.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in fields.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields, tokens))


def _tokenizer_config(fields: _Fields, tokens: list[str]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    return {
        **special,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.need("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
