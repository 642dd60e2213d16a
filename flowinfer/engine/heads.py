"""Which draft head a model has, and whether a head suits a model, by the header of its file. Never imports torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec

from flowinfer.engine import hub
from flowinfer.engine.manifest import HEAD
from flowinfer.engine.sources import ALIASES, HEADS
from flowinfer.errors import ModelError

METADATA = "flowinfer_draft"  # in the header: the head's sizes as JSON, as engine.draft writes them
_MOST_HEADER = 10 << 20


class HeadInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the header of a head's file says. block: tokens it drafts.  digest: of the target's weights, or empty."""

    target: str
    hidden_size: int
    vocab_size: int
    feature_layers: tuple[int, ...]
    block: int
    digest: str = ""
    num_params: int = 0


def shipped(model: str) -> Path | None:
    """The head that comes with a model: of the package, or a draft.safetensors in the model's own folder."""
    name = next((alias for alias, source in ALIASES.items() if source.hub_id == model), model)
    if name in HEADS:
        return HEADS[name] if HEADS[name].is_file() else None
    folder = _folder(model)
    return folder / HEAD if folder and (folder / HEAD).is_file() else None


def _folder(model: str) -> Path | None:
    """Of a model that is here. A GGUF file is left alone: it would be converted first."""
    if model.endswith(".gguf"):
        return None
    try:
        return hub.resolve(model)
    except ModelError:
        return None


def find(model: str, head: str) -> Path:
    """The file of a head that is given (a file, or a folder with a draft.safetensors), else the model's own.

    Raises ModelError saying what would do where there is none.
    """
    if head:
        path = Path(head).expanduser()
        path = path / HEAD if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"there is no draft head {path}.", help="Leave `head` out, or give a file that is there.")
        return path
    path_or_none = shipped(model)
    if path_or_none is None:
        known = " and ".join(name for name in HEADS if shipped(name)) or "no model"
        raise ModelError(
            f"no draft head is known for {model or 'a model without a name'}.",
            help=f"Heads come with {known}; else give `head: PATH`, or write `draft: ngram`.",
        )
    return path_or_none


def read(path: Path) -> HeadInfo:
    """The header of a head's file. Raises ModelError where it is none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MOST_HEADER:
                raise ValueError("no safetensors file")
            header = json.loads(file.read(size))
        written = header.get("__metadata__", {})[METADATA]
        info = msgspec.json.decode(written, type=HeadInfo)
    except KeyError:
        raise ModelError(f"{path} is no draft head: its header lacks {METADATA!r}.") from None
    except (OSError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} can't be read as a draft head: {error}.") from None
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return msgspec.structs.replace(info, num_params=sum(math.prod(shape) for shape in shapes))


def describe(model: str) -> str:
    """The model's own head, for people."""
    path = shipped(model)
    if path is None:
        return "none: draft by ngram, suffix or model"
    problem = misfit(model, "")
    if problem is not None:
        return problem.message
    info = read(path)
    size, layers = path.stat().st_size / 2**20, ", ".join(map(str, info.feature_layers))
    folder = _folder(model)
    others = info.digest and folder is not None and info.digest != hub.describe(folder).digest
    note = " (trained beside other weights: fewer of its drafts may hold)" if others else ""
    sizes = f"{info.num_params / 1e6:,.1f} M ({size:,.1f} MiB)"
    return f"{info.block} tokens a pass, {sizes}, reads layers {layers}{note}: {path}"


def is_nowhere(model: str) -> bool:
    """Whether it's the path of a folder that isn't there: whoever loads the model says so."""
    path = Path(model).expanduser()
    return path.is_absolute() and not path.exists()


def misfit(model: str, head: str) -> ModelError | None:
    """Why the head can't draft for this model; None if it can, or if the model isn't here to be compared.

    Other weights of the same shape, as another precision of the model or a fine-tuned one, are no reason: drafts are
    verified, so at worst fewer of them hold.
    """
    try:
        path = find(model, head)
        info = read(path)
    except ModelError as error:
        return error
    folder = _folder(model)
    if folder is None:
        return None
    target = hub.describe(folder)
    config, pairs = target.config, []
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(info, name):
            pairs.append(f"{name} {getattr(info, name)}, the model {getattr(config, name)}")
    if max(info.feature_layers, default=-1) >= config.num_layers:
        pairs.append(f"layer {max(info.feature_layers)}, the model has {config.num_layers}")
    if not pairs:
        return None
    text = f"the draft head {path} was made for {info.target} with {'; '.join(pairs)}: it would draft nonsense."
    return ModelError(text, help="Use the head that belongs to the model, or draft: ngram.")
