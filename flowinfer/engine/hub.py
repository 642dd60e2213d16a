"""Turns what `model:` says into a folder on this machine, and tells what a folder holds. Never imports torch.

A model is one of the package (flowinfer-mini), an alias (smollm2-135m), a local Hugging Face folder, a GGUF file, or
a hub id (org/name).
"""

from __future__ import annotations

import difflib
import hashlib
import re
import shutil
from pathlib import Path

import msgspec

from flowinfer.engine import manifest
from flowinfer.engine.formats import FP8, INSTEAD, Format, check_stored, numbers_of, read_tensors
from flowinfer.engine.layout import BLOCK_TOKENS, KV_FP8, KVLayout
from flowinfer.engine.models.config import ModelConfig, read_config
from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.models.named import wants_random
from flowinfer.engine.sources import ALIASES, BUNDLED, Source
from flowinfer.errors import ModelError
from flowinfer.folders import cache_dir

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a model folder holds, read from its small files only."""

    path: Path
    digest: str
    config: ModelConfig

    @property
    def architecture(self) -> str:
        """Hugging Face class name."""
        return self.config.architecture

    @property
    def num_params(self) -> int:
        """Weights, without norms and biases."""
        return self.config.num_params

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""
        return self.config.max_positions

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.config.eos_token_ids

    def dtype(self, wanted: str = "auto") -> str:
        """The dtype that `wanted` means for this model: auto is the file's own."""
        return self.config.dtype if wanted == "auto" else wanted

    def layout(
        self, dtype: str = "auto", *, kernels: str = "", weights: str = "checkpoint", kv: str = "auto"
    ) -> KVLayout:
        """The shape of this model's KV in the given dtype. kernels: as in KVLayout. weights, kv: as stages set them."""
        grouped = self.config if isinstance(self.config, V4Config) else None
        return KVLayout(
            model=self.digest,
            dtype=KV_FP8 if kv == FP8 else self.dtype(dtype),
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_tokens=grouped.block_tokens if grouped else BLOCK_TOKENS,
            sections=grouped.sections() if grouped else (),
            window=grouped.window if grouped else 0,
            kernels=kernels,
            quantized=numbers_of(weights),
        )


def resolve(model: str, *, pull: bool = False) -> Path:
    """The Hugging Face folder of a model; with pull, fetched where it's missing.

    A GGUF file is converted into the cache at its first use (about 5 s). Raises ModelError with the command to run.
    """
    if model in BUNDLED:
        return BUNDLED[model]
    local = Path(model).expanduser()
    if model not in ALIASES and local.is_dir():
        return _checked_folder(local)
    if model not in ALIASES and local.is_file():
        return _converted(local)
    folder = _folder(model)
    if manifest.is_intact(folder):
        return folder
    if pull:
        return _fetched(model, progress=True)
    raise ModelError(f"model {model!r} isn't on this machine.", help=f"Run: flowinfer models pull {model}")


def known(model: str) -> Path | None:
    """The folder of a model if it's on this machine as one. Fetches, converts and verifies nothing."""
    if model in BUNDLED:
        return BUNDLED[model]
    local = Path(model).expanduser()
    if model not in ALIASES and local.exists():
        return local if (local / "config.json").is_file() else None
    folder = cache_dir() / "models" / model.replace("/", "--")
    return folder if (folder / "config.json").is_file() else None


def pull(model: str, progress: bool = True) -> Path:
    """Fetches a model into the cache, unless it's there and intact. Raises ModelError saying why it can't be had."""
    local = Path(model).expanduser()
    if model in BUNDLED or (model not in ALIASES and local.exists()):
        return resolve(model)
    return _fetched(model, progress=progress)


def verify(model: str) -> bool:
    """Whether every byte of a pulled model, or of one that came with the package, is what it was."""
    if model in BUNDLED:
        return manifest.matches(BUNDLED[model])
    return manifest.is_intact(_folder(model), full=True)


def discard(model: str) -> None:
    """Removes a pulled model from the cache. Raises ModelError for one that belongs to the package."""
    if model in BUNDLED:
        raise ModelError(f"{model} came with flowinfer and is damaged.", help="Install flowinfer again.")
    shutil.rmtree(_folder(model), ignore_errors=True)


def stored(path: Path, config: ModelConfig) -> dict[Format, int]:
    """How many weights of a folder are stored plainly, in FP8 and in FP4, from the headers of its files.

    Raises ModelError naming the first tensor that can't be read.
    """
    tensors = read_tensors(path, skip=(manifest.HEAD,))
    if not tensors and not wants_random(path):
        raise ModelError(f"{path} holds no *.safetensors.", help="Other weight formats must be converted first.")
    if config.scale_block is None:
        return check_stored(tensors, scaled=False)
    found = check_stored(tensors, scaled=True, block=config.scale_block)
    if found.get("fp4") and not isinstance(config, V4Config):
        raise ModelError("FP4 weights of this architecture aren't supported.", help=INSTEAD)
    return found


def describe(path: Path) -> ModelInfo:
    """Sizes, digest and KV layout of a folder, in milliseconds. Raises ModelError as read_config does."""
    return ModelInfo(path=path, digest=manifest.digest(path), config=read_config(path))


def pulled() -> dict[str, Path]:
    """Complete models in the cache, by the name that `model:` takes."""
    folders = sorted((cache_dir() / "models").glob("[!.]*/" + manifest.NAME))
    return {path.parent.name.replace("--", "/"): path.parent for path in folders}


def source(model: str) -> Source:
    """Where a model comes from. Raises ModelError with the nearest alias for a name that can't be one."""
    if model in ALIASES:
        return ALIASES[model]
    if _HUB_ID.fullmatch(model):
        return Source(hub_id=model)
    names = [*BUNDLED, *ALIASES]
    near = difflib.get_close_matches(model, names, n=1)
    hint = (
        f"Did you mean {near[0]}?" if near else f"Give a folder, a GGUF file, a hub id or one of: {', '.join(names)}."
    )
    raise ModelError(f"there is no model {model!r}.", help=hint)


def _folder(model: str) -> Path:
    source(model)
    return cache_dir() / "models" / model.replace("/", "--")


def _fetched(model: str, *, progress: bool) -> Path:
    from flowinfer.engine.pull import pull  # here: `flowinfer check` needs no network code, and this costs 0.2 s

    return pull(source(model), _folder(model), progress=progress)


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json.", help="Give a Hugging Face model folder.")
    return folder.resolve()


def _converted(file: Path) -> Path:
    """The folder that a GGUF file becomes, named by its path, size and time."""
    if file.suffix != ".gguf":
        raise ModelError(f"{file} is neither a folder nor a .gguf file.", help="Give a Hugging Face model folder.")
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_dir() / "models" / f".gguf-{key}"
    if manifest.is_intact(folder):
        return folder
    from flowinfer.engine.pull import convert_into

    return convert_into(file, folder)
