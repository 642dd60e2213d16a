"""Where things are kept between runs. No heavy imports."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Models, KV in `kv`, compiled loops in `loops`: FLOWINFER_CACHE, else ~/.cache/flowinfer."""
    return Path(os.environ.get("FLOWINFER_CACHE") or "~/.cache/flowinfer").expanduser()
