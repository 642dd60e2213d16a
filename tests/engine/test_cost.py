"""The step-time model learns a machine's speed, whatever noise, drift and outliers it sees."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.engine.cost import MOST_TOKENS, StepTimeModel, query_key_pairs

TRUE = (6e-3, 2.5e-4, 1e-7)
CHEAP_ATTENTION = (6e-3, 2.5e-4, 8e-9)
# Tokens, query-key pairs, CPU milliseconds of steps of SmolLM2-135M in float32: one thread of a busy 2-core machine.
# fmt: off
MEASURED = [
    (64, 133152, 503), (64, 2080, 191), (64, 34848, 252), (64, 18464, 228), (64, 18464, 217), (64, 34848, 253),
    (32, 16912, 159), (32, 4624, 120), (32, 66064, 220), (16, 8328, 98), (64, 34848, 246), (128, 8256, 369),
    (64, 2080, 187), (16, 32904, 145), (64, 18464, 200), (128, 8256, 329), (64, 18464, 199), (64, 34848, 217),
    (32, 16912, 126), (64, 18464, 207), (128, 24640, 387), (16, 32904, 164), (128, 8256, 378), (16, 16520, 106),
    (64, 67616, 304), (16, 8328, 105), (64, 133152, 408), (64, 2080, 206), (64, 67616, 299), (16, 136, 70),
    (128, 8256, 347), (32, 66064, 243), (32, 66064, 230), (128, 41024, 393), (16, 136, 93), (64, 34848, 268),
    (64, 2080, 188), (64, 34848, 225), (64, 67616, 304), (16, 8328, 81), (64, 133152, 358), (128, 8256, 363),
    (128, 73792, 459), (128, 24640, 387), (64, 2080, 187), (128, 270400, 664), (64, 10272, 210), (128, 8256, 355),
    (64, 2080, 195), (32, 66064, 232), (32, 528, 106), (128, 139328, 495), (64, 18464, 212), (16, 136, 71),
    (32, 528, 109), (16, 32904, 166), (16, 16520, 132), (128, 139328, 548), (64, 133152, 434), (128, 24640, 375),
]
# fmt: on
positive = st.floats(1e-9, 1e-1)


def true_time(tokens, pairs, truth=TRUE):
    return truth[0] + truth[1] * tokens + truth[2] * pairs


def steps(rng, count, longest=8192):
    for _ in range(count):
        tokens = rng.randint(1, 512)
        yield tokens, query_key_pairs(rng.randint(0, longest), tokens)


def train(model, rng, count, *, noise=0.0, truth=TRUE, longest=8192):
    for tokens, pairs in steps(rng, count, longest):
        model.observe(tokens, pairs, true_time(tokens, pairs, truth) * (1 + rng.uniform(-noise, noise)))
    return model


def worst_error(model, rng, truth=TRUE, longest=8192):
    cases = list(steps(rng, 200, longest))
    return max(abs(model.predict(*case) / true_time(*case, truth) - 1) for case in cases)


@pytest.mark.parametrize("shape", [TRUE, CHEAP_ATTENTION])
@pytest.mark.parametrize("scale", [1e-3, 1, 30])
def test_a_hundred_clean_steps_give_the_time_of_any_step(scale, shape):
    truth = tuple(scale * value for value in shape)
    model = train(StepTimeModel(), random.Random(1), 100, truth=truth)
    assert worst_error(model, random.Random(2), truth) < 0.06


def test_measured_steps_of_a_model_are_predicted_from_the_second_on():
    model, errors = StepTimeModel(), []
    for tokens, pairs, milliseconds in MEASURED:
        errors.append(abs(model.predict(tokens, pairs) / (milliseconds / 1e3) - 1))
        model.observe(tokens, pairs, milliseconds / 1e3)
    errors = sorted(errors[1:])
    assert errors[len(errors) // 2] < 0.08 and errors[len(errors) * 9 // 10] < 0.25


def test_noise_averages_out():
    model = train(StepTimeModel(), random.Random(3), 300, noise=0.15)
    assert worst_error(model, random.Random(4)) < 0.12


def test_one_step_sets_the_scale():
    model = StepTimeModel()
    model.observe(256, query_key_pairs(0, 256), 1e-3 * true_time(256, query_key_pairs(0, 256)))
    assert model.predict(256, query_key_pairs(0, 256)) == pytest.approx(1e-3 * true_time(256, 32896), rel=0.05)


def test_a_slow_first_step_is_soon_forgotten():
    rng, model = random.Random(5), StepTimeModel()
    model.observe(128, query_key_pairs(0, 128), 20 * true_time(128, 8256))
    train(model, rng, 6)
    assert worst_error(model, random.Random(6), longest=2048) < 0.3


def test_one_step_in_ten_at_ten_times_the_time_moves_little():
    rng = random.Random(7)
    model = StepTimeModel()
    for i, (tokens, pairs) in enumerate(steps(rng, 300)):
        model.observe(tokens, pairs, true_time(tokens, pairs) * (10 if i % 10 == 4 else 1))
    assert worst_error(model, random.Random(8)) < 0.15


@pytest.mark.parametrize("change", [0.4, 3.0])
def test_a_lasting_change_of_speed_is_followed(change):
    rng = random.Random(9)
    model = train(StepTimeModel(), rng, 200)
    truth = tuple(change * value for value in TRUE)
    train(model, rng, 150, truth=truth)
    assert worst_error(model, random.Random(10), truth) < 0.15


def test_an_hour_of_short_prompts_does_not_erase_what_a_long_one_taught():
    rng = random.Random(11)
    model = train(StepTimeModel(), rng, 100, longest=65_536)
    train(model, rng, 2000, noise=0.1, longest=16)
    long_step = (64, query_key_pairs(60_000, 64))
    assert model.predict(*long_step) == pytest.approx(true_time(*long_step), rel=0.3)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10**9), st.floats(-1, 1e3)), max_size=60))
def test_whatever_it_sees_coefficients_stay_finite_and_never_negative(observations):
    model = StepTimeModel()
    for observation in observations:
        model.observe(*observation)
    assert all(0 <= value < float("inf") for value in model.coefficients)
    assert model.predict(1, 1) > 0


@given(positive, positive, st.floats(0, 1e-6), st.floats(0, 10), st.integers(0, 10**6), st.integers(0, 4096))
def test_tokens_within_is_the_most_that_fits(a, b, c, budget, context, other):
    model = StepTimeModel((a, b, max(c, 1e-15)))
    beside = (other, query_key_pairs(0, other))
    count = model.tokens_within(budget, context, beside=beside)

    def time(n):
        return model.predict(other + n, beside[1] + query_key_pairs(context, n))

    slack = 1e-9 * time(count + 1)
    assert count == 0 or time(count) <= budget + slack
    assert count == MOST_TOKENS or time(count + 1) > budget - slack


def test_steps_that_say_nothing_are_ignored():
    model = StepTimeModel()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(16, 136, seconds)
    model.observe(0, 0, 1.0)
    assert model.num_observed == 0 and model.coefficients == StepTimeModel().coefficients
