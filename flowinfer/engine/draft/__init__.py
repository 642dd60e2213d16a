"""Draft heads: small networks that read a target's residual stream and propose its next tokens, a block a pass."""

from flowinfer.engine.draft.head import DraftHead, DraftState, HeadConfig

__all__ = ["DraftHead", "DraftState", "HeadConfig"]
