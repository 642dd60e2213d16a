"""The meaning of reject: the sampler's yardstick, in plain torch."""

from __future__ import annotations

from flowinfer.engine.sampling.rejection import reject as reject_reference

__all__ = ["reject_reference"]
