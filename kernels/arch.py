"""What each GPU kernel needs and what stands in for it: one table, read once when a model is loaded.

Leaves the choice of tiles to the kernels. Imports neither torch nor triton until it is asked about a device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

from flowinfer.errors import KernelUnsupported

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Needs:
    """An op's requirements. capability: the least one; dtypes: of weights and KV; fallback: what runs instead.

    alone: only that generation of cards has the instructions.  anywhere: it is made of torch's ops, for any device.
    loops: a CPU has it too, in compiled loops (see compiled).  tiles: it is for CPUs alone that have this feature, as
    LLVM calls it (see tiles).
    """

    op: str
    capability: Capability
    dtypes: tuple[str, ...]
    fallback: str
    triton: bool = True
    torch_op: str = ""  # of the torch namespace, where the kernel is torch's own
    cute: bool = False  # compiled by the CuTe DSL
    alone: bool = False
    anywhere: bool = False
    loops: bool = False
    tiles: str = ""


FEATURES = {"avx512bf16": "AVX512_BF16", "avx512vnni": "AVX512_VNNI"}  # of processors: LLVM's names and the makers'
_FLOATS = ("bfloat16", "float32")
TABLE: tuple[Needs, ...] = (
    Needs("decode_attention", (8, 0), _FLOATS, "paged_attention: pages are gathered, then torch's attention"),
    Needs("prefill_attention", (8, 0), _FLOATS, "paged_attention: pages are gathered, then torch's attention"),
    Needs("skinny_linear", (8, 0), _FLOATS, "torch.nn.functional.linear"),
    Needs("invariant_attention", (8, 0), _FLOATS, "none: batch_invariant is refused"),
    Needs("invariant_linear", (8, 0), _FLOATS, "none: batch_invariant is refused"),
    Needs("norm", (8, 0), _FLOATS, "torch.nn.functional.rms_norm", loops=True),
    Needs("rope", (8, 0), _FLOATS, "engine.models.rope.rotate", loops=True),
    Needs("activation", (8, 0), _FLOATS, "torch.nn.functional.silu", loops=True),
    Needs("experts", (8, 0), _FLOATS, "a loop over experts"),
    Needs("fp8_linear", (8, 9), ("bfloat16",), "weights as the model's dtype; `weights: fp8` is refused"),
    Needs("fp8_experts", (8, 9), ("bfloat16",), "weights as the model's dtype; `weights: fp8` is refused"),
    Needs("indexer_topk", (8, 0), _FLOATS, "a product over all entries, and a stable sort"),
    Needs("sparse_attention", (8, 0), _FLOATS, "window keys and entries are gathered, then torch's products"),
    Needs("compressor", (8, 0), _FLOATS, "groups are gathered, then pooled by torch"),
    Needs("hyper_connections", (8, 0), _FLOATS, "engine.models.deepseek_v4.ops"),
    Needs("norm_turn", (8, 0), _FLOATS, "engine.models.deepseek_v4.ops"),
    Needs("router", (8, 0), _FLOATS, "engine.models.deepseek_v4.ops, and torch.topk"),
    Needs("greedy", (8, 0), _FLOATS, "torch.max"),
    Needs("draw", (8, 0), _FLOATS, "sampling: a sort of each row, and a wait for the host"),
    Needs("verify_attention", (8, 0), _FLOATS, "prefill_attention, a launch at a time, and a wait for the host"),
    Needs("verify", (8, 0), _FLOATS, "spec-verify counts drafts that hold on the host"),
    Needs("ngram", (8, 0), _FLOATS, "spec-verify looks drafts up on the host"),
    Needs("rejection", (8, 0), ("float32", "float64"), "engine.sampling.rejection, in torch"),
    Needs("dequantize", (8, 0), _FLOATS, "a table look-up and a product in float32"),
    Needs(
        "copy_blocks",
        (8, 0),
        ("bfloat16", "float32", "float16", "float8_e4m3fn"),
        "a copy by the driver for each block",
    ),
    Needs(
        "grouped_experts",
        (9, 0),
        ("bfloat16",),
        "grouped_mm, with passes of its own for gather and gate",
        cute=True,
        alone=True,
    ),
    Needs("tile_linear", (0, 0), ("bfloat16",), "oneDNN's packed product", triton=False, tiles="avx512bf16"),
    Needs("int8_linear", (0, 0), ("bfloat16",), "torch's packed product of int8", triton=False, tiles="avx512vnni"),
    Needs("paged_attention", (0, 0), _FLOATS, "none", triton=False, anywhere=True, loops=True),
    Needs("sampling", (0, 0), ("float32",), "none: logits become float32 before", triton=False, anywhere=True),
    Needs("grouped_mm", (9, 0), ("bfloat16",), "experts: the Triton product", triton=False, torch_op="_grouped_mm"),
)
BY_OP = {needs.op: needs for needs in TABLE}


def missing(needs: Needs, capability: Capability | None, dtype: str) -> str:
    """What keeps the op from running there, in words; empty where nothing does. capability None: not a CUDA device."""
    if needs.anywhere:
        return ""
    if needs.tiles:
        return _on_cpu(needs, capability, dtype)
    if capability is None:
        return "a CUDA device"
    if capability < needs.capability:
        wanted, got = (".".join(map(str, c)) for c in (needs.capability, capability))
        return f"compute capability {wanted} (this card has {got})"
    if needs.alone and capability[0] != needs.capability[0]:
        return f"the instructions of compute capability {needs.capability[0]}.x (this card has {capability[0]}.x)"
    if needs.triton and not has_triton():
        return "the package triton"
    if needs.cute and not has_cute():
        return "the package nvidia-cutlass-dsl"
    if dtype not in needs.dtypes:
        return f"{' or '.join(needs.dtypes)} (got {dtype})"
    if needs.torch_op and not _torch_has(needs.torch_op):
        return f"torch.{needs.torch_op}"
    return ""


def _on_cpu(needs: Needs, capability: Capability | None, dtype: str) -> str:
    from flowinfer.kernels import compiled

    if capability is not None:
        return "a CPU"
    if dtype not in needs.dtypes:
        return f"{' or '.join(needs.dtypes)} (got {dtype})"
    return compiled.missing() or compiled.missing_feature(needs.tiles)


def require(op: str, device: str, dtype: str) -> None:
    """Raises KernelUnsupported naming the missing feature and the fallback."""
    needs = BY_OP[op]
    if lacks := missing(needs, capability_of(device), dtype):
        raise KernelUnsupported(f"{op} on {device} needs {lacks}.", help=f"Instead: {needs.fallback}.")


def supported(op: str, device: str, dtype: str) -> bool:
    """Whether the op runs on this device for this dtype."""
    return not missing(BY_OP[op], capability_of(device), dtype)


@lru_cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


@lru_cache
def has_cute() -> bool:
    """Whether the CuTe DSL can be imported, or a library of its kernels was named."""
    return bool(os.environ.get("FLOWINFER_GROUPED_EXPERTS")) or find_spec("nvidia_cutlass_dsl") is not None


def capability_of(device: str) -> Capability | None:
    """Compute capability of a torch device name; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def _torch_has(name: str) -> bool:
    import torch

    return hasattr(torch, name)
