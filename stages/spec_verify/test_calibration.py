"""Temperature and offset find what makes confidences true."""

from __future__ import annotations

import numpy as np
import pytest

from flowinfer.stages.spec_verify.calibration import Calibration


def drafts(true_temperature: float, count: int = 4_096) -> tuple[np.ndarray, np.ndarray]:
    """What a drafter says of its drafts that is right once divided by this temperature, and whether they held."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0.5, 2.0, count)
    held = generator.random(count) < 1 / (1 + np.exp(-logits / true_temperature))
    return (1 / (1 + np.exp(-logits))).astype(np.float32), held


@pytest.mark.parametrize("true", [0.5, 1.0, 3.0])
def test_the_temperature_is_found(true: float) -> None:
    calibration = Calibration()
    said, held = drafts(true)
    for part in np.split(np.arange(len(said)), 256):
        calibration.learn(said[part], held[part])
    assert true / 1.5 < calibration.temperature < true * 1.5
    confidences = calibration.apply(said)
    assert abs(confidences.mean() - held.mean()) < 0.03


def test_before_it_knows_anything_it_believes_the_drafter() -> None:
    said = np.array([0.1, 0.5, 0.9], np.float32)
    assert Calibration().apply(said) == pytest.approx(said)


def test_certainties_stay_finite() -> None:
    calibration = Calibration()
    calibration.learn(np.array([0.0, 1.0] * 64, np.float32), np.array([True, False] * 64))
    assert np.isfinite(calibration.apply(np.array([0.0, 1.0], np.float32))).all()
    assert calibration.temperature > 5


def test_drafts_that_hold_more_often_than_they_are_likely_are_believed() -> None:
    calibration = Calibration()
    said = np.full(512, 0.05, np.float32)
    for _ in range(6):
        calibration.learn(said, np.arange(512) % 10 > 0)
    assert calibration.apply(said[:1])[0] == pytest.approx(0.9, abs=0.05)


def test_what_is_likelier_never_gets_less_confidence() -> None:
    calibration, said = Calibration(), np.linspace(0.01, 0.99, 256).astype(np.float32)
    calibration.learn(said, said < 0.5)
    assert (np.diff(calibration.apply(said)) >= 0).all()
