"""Tests beside pipelines (`*_test.yaml`): requests, recordings and faults in, expectations out. README.md says how."""

from flowinfer.testing.checks import Outcome
from flowinfer.testing.file import PipelineTest
from flowinfer.testing.run import run_inline, run_over_http, run_real

__all__ = ["Outcome", "PipelineTest", "run_inline", "run_over_http", "run_real"]
