"""The table of what kernels need: the missing feature is named, with what runs instead."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import arch


def test_the_missing_feature_is_named() -> None:
    needs = arch.BY_OP["grouped_mm"]
    assert arch.missing(needs, None, "bfloat16") == "a CUDA device"
    assert "9.0" in arch.missing(needs, (8, 0), "bfloat16") and "8.0" in arch.missing(needs, (8, 0), "bfloat16")
    assert "float32" in arch.missing(needs, (9, 0), "float32")
    assert arch.missing(needs, (9, 0), "bfloat16") == ""


def test_triton_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "has_triton", lambda: False)
    assert arch.missing(arch.BY_OP["norm"], (9, 0), "bfloat16") == "the package triton"


def test_a_kernel_that_cannot_run_says_what_runs_instead() -> None:
    with pytest.raises(KernelUnsupported, match="a CUDA device") as caught:
        arch.require("experts", "cpu", "bfloat16")
    assert arch.BY_OP["experts"].fallback in caught.value.help


def test_doctor_lists_every_kernel() -> None:
    from flowinfer.cli.doctor import doctor

    done = CliRunner().invoke(doctor, [], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert all(needs.op in done.output for needs in arch.TABLE)
    assert "a CPU has no FP4 units; instead: bfloat16" in done.output and "weights: int4" in done.output
