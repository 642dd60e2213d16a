"""FlowInfer: LLM inference as one typed, checked, re-wirable dataflow graph."""

__version__ = "0.1.0"
