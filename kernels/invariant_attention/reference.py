"""The meaning of invariant_attention: that of prefill_attention."""

from flowinfer.kernels.prefill_attention.reference import prefill_attention_reference as invariant_attention_reference

__all__ = ["invariant_attention_reference"]
