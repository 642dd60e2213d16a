"""Finds the class of a stage: built in, from an installed package, or from a local file. Imports it only when asked."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

from flowinfer.errors import FlowInferError
from flowinfer.spec.hints import did_you_mean
from flowinfer.stage import Stage

ENTRY_POINTS = "flowinfer.stages"
_BUILTIN = {
    "recipe-tokenize": "flowinfer.stages.recipe_tokenize.stage:RecipeTokenize",
    "bucket-route": "flowinfer.stages.bucket_route.stage:BucketRoute",
    "cache-lookup": "flowinfer.stages.cache_lookup.stage:CacheLookup",
    "prefill": "flowinfer.stages.prefill.stage:Prefill",
    "kv-transfer": "flowinfer.stages.kv_transfer.stage:KVTransfer",
    "moe-decode": "flowinfer.stages.moe_decode.stage:MoeDecode",
    "spec-verify": "flowinfer.stages.spec_verify.stage:SpecVerify",
    "detokenize": "flowinfer.stages.detokenize.stage:Detokenize",
}
_LOCAL = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")


class StageNotFound(FlowInferError):
    """A `use` that leads to no stage; `code` is the problem's code."""

    def __init__(self, code: str, message: str, *, help: str = "") -> None:
        super().__init__(message, help=help)
        self.code = code


def builtin_kinds() -> tuple[str, ...]:
    """Kinds that come with FlowInfer, in the order in which a request meets them."""
    return tuple(_BUILTIN)


def installed_kinds() -> dict[str, str]:
    """Kinds of installed packages (entry point group `flowinfer.stages`): kind -> `module:Class`."""
    return dict(_entry_points())


@cache
def _entry_points() -> tuple[tuple[str, str], ...]:
    from importlib.metadata import entry_points

    return tuple((point.name, point.value) for point in entry_points(group=ENTRY_POINTS))


def is_local(use: str) -> bool:
    """True for ./file.py:Class."""
    return _LOCAL.fullmatch(use) is not None


def canonical(use: str, base: Path | None = None) -> str:
    """`use` so that any process finds the stage: the path of a local file becomes absolute."""
    match = _LOCAL.fullmatch(use)
    if match is None:
        return use
    return f"{_local_file(match['file'], base)}:{match['name']}"


def _local_file(file: str, base: Path | None) -> Path:
    return ((base or Path.cwd()) / Path(file).expanduser()).resolve()


def load_stage(use: str, *, base: Path | None = None, allow_local: bool = False) -> type[Stage]:
    """The stage class of a kind or of ./file.py:Class (relative to `base`). Raises StageNotFound."""
    if match := _LOCAL.fullmatch(use):
        if not allow_local:
            help = "Add --allow-local if you trust that file: its code runs on check."
            raise StageNotFound("FI208", f"`{use}` is a local file, and local files are off.", help=help)
        return _pick(_import_file(_local_file(match["file"], base)), match["name"], use)
    target = _BUILTIN.get(use) or installed_kinds().get(use)
    if target is None:
        kinds = [*_BUILTIN, *installed_kinds()]
        help = did_you_mean(use, kinds) or "`flowinfer stages` lists the kinds."
        raise StageNotFound("FI206", f"There is no stage of the kind `{use}`.", help=help)
    module, _, name = target.partition(":")
    return _pick(_import_module(module, use), name, use)


def _import_module(module: str, use: str) -> object:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise _broken(use, error) from error


def _import_file(file: Path) -> object:
    name = f"flowinfer_local_{file.stem}_{_version(file)}"
    if name in sys.modules:
        return sys.modules[name]
    # With a search path the file is a package, so that `from .policy import ...` finds its neighbours.
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    if not file.is_file() or spec is None or spec.loader is None:
        raise StageNotFound("FI207", f"There is no file {file}.", help="The path is relative to the pipeline file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations of the stage are looked up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(file.name, error) from error
    return module


def _version(file: Path) -> str:
    """Names a local file and its neighbours as they are now, so that code that was edited is imported anew."""
    times = [(path.name, path.stat().st_mtime_ns) for path in sorted(file.parent.glob("*.py"))]
    return hashlib.sha256(repr((str(file), times)).encode()).hexdigest()[:8]


def _broken(what: str, error: BaseException) -> StageNotFound:
    place = error.__traceback__
    while place and place.tb_next:
        place = place.tb_next
    where = f" ({Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno})" if place else ""
    return StageNotFound("FI207", f"`{what}` can't be imported: {type(error).__name__}: {error}{where}.")


def _pick(module: object, name: str, use: str) -> type[Stage]:
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Stage)):
        stages = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Stage) and v is not Stage]
        raise StageNotFound("FI207", f"`{use}` holds no stage class `{name}`.", help=did_you_mean(name, stages))
    return found
