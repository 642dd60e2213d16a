"""Whatever text stands in a file: a list of problems or a plan comes out, never a traceback."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flowinfer.errors import SpecError
from flowinfer.graph import load_plan

FILE = Path(__file__).parents[2] / "pipelines/prod.yaml"
PROD = FILE.read_text()
TOKENS = [
    *PROD.split(),
    "\n",
    "  ",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "- ",
    "!drop",
    "*a",
    "&a",
    "${model}",
    "on",
    "012",
    "->",
    "a -> b",
    "%",
]


def check_text(text: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
        file.flush()
        try:
            load_plan(file.name)
        except SpecError as error:
            assert error.problems and all(problem.mark for problem in error.problems)


@given(st.text(max_size=200))
@example("\ud800")
@example("? ? ?\n")
@example("a: \x00")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text(text: str) -> None:
    check_text(text)


@given(st.lists(st.sampled_from(TOKENS), max_size=60).map(" ".join))
@settings(max_examples=150, deadline=None)
def test_any_words_of_the_format(text: str) -> None:
    check_text("flowinfer: 1\n" + text)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_edit_of_a_good_file(data: st.DataObject) -> None:
    text = PROD
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 30)))
        text = text[:start] + data.draw(st.sampled_from(TOKENS) | st.text(max_size=3)) + text[end:]
    check_text(text)


@given(
    st.lists(
        st.sampled_from(["stages", "verify", "with", "edges", "a -> b", "=", ".", '"', "x", "3", "on", "[", "!drop"]),
        max_size=9,
    )
)
@example(["edges", ".", "=", "3"])
@example(["=", "="])
@settings(max_examples=150, deadline=None)
def test_any_set(parts: list[str]) -> None:
    with contextlib.suppress(SpecError):
        load_plan(FILE, sets=["".join(parts)])


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "api", "prefill", "decode", "x", "-1s"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["with", "use", "place", "a", ""]), inner)
    ),
    max_leaves=6,
)


@given(st.sampled_from(["serve", "workers", "stages", "edges", "network", "vars", "name", "flowinfer"]), values)
@settings(max_examples=100, deadline=None)
def test_any_value_of_any_section(section: str, value: object) -> None:
    check_text(f"flowinfer: 1\nstages: {{d: {{use: detokenize}}}}\n{section}: {json.dumps(value)}\n")
