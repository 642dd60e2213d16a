"""What a test file (`*_test.yaml`) may say: requests, what is cut or mocked, faults, expectations. Runs nothing.

Read as pipeline files are: every mistake at once, each with its place, the line and a suggestion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from flowinfer.errors import FlowInferError, Problem, SpecError
from flowinfer.graph import load_plan
from flowinfer.graph.plan import Plan
from flowinfer.spec.tree import Node, read_tree
from flowinfer.spec.validation import STRUCTURE, validate
from flowinfer.testing.expect import EdgeName, Expect, RunExpect, Strict
from flowinfer.units import Duration

SHIPPED = Path(__file__).parents[1] / "pipelines"
FaultKind = Literal["kill", "delay", "drop_credit", "corrupt", "full_disk"]
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)


class Case(Strict):
    """One request: a `chat` (a string, or messages), a `prompt`, or in a cut a `message`."""

    name: str
    """Names the case in reports and in `order`."""
    chat: str | list[dict[str, Any]] | None = None
    """What the user says, or all messages."""
    prompt: str | list[int] | None = None
    """A completion's prompt, as text or token ids."""
    message: dict[str, Any] | None = None
    """In a cut: fields of the message that comes in; `num_tokens: 5000` stands for so many tokens."""
    at: Duration | None = None
    """Sent at this time; without, when all cases before it have ended."""
    fields: dict[str, Any] = Field({}, alias="with")
    """Further fields of the API, as in max_tokens."""
    expect: Expect | None = None
    """What must hold of the answer."""

    @model_validator(mode="after")
    def _asks_one_thing(self) -> Case:
        if sum(given is not None for given in (self.chat, self.prompt, self.message)) != 1:
            raise ValueError("give either chat or prompt, or in a cut message")
        return self

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/completions" if self.chat is None else "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Of the request."""
        asked: dict[str, Any] = {"prompt": self.prompt}
        if self.chat is not None:
            asked = {"messages": [{"role": "user", "content": self.chat}] if isinstance(self.chat, str) else self.chat}
        return {"model": model, "temperature": 0, **asked, **self.fields}


class Cut(Strict):
    """A part of the graph that is tested without the rest."""

    first: str | None = Field(None, alias="from")
    """Its first stage; without, all behind the api."""
    last: str | None = Field(None, alias="to")
    """Its last stage; without, all before the api."""


class Mock(Strict):
    """Stages that aren't run: what they gave in a recording is given again, to the same message."""

    first: str = Field(alias="from")
    """The first stage of the part that is replaced; the mock bears its name."""
    last: str | None = Field(None, alias="to")
    """The last one; without, only that one."""
    recording: str | None = None
    """A recording (flowinfer record), relative to this file; without, the file's `recording`."""
    worker: str | None = None
    """Where the mock runs; without, where its first stage would."""
    speed: PositiveFloat | Literal["max"] = 1.0
    """1: answers take as long as in the recording; 10: a tenth of that; max: no time."""


class Fault(Strict):
    """Something that goes wrong: one of kill, delay, drop_credit, corrupt, full_disk, and when it begins."""

    kill: str | None = None
    """The worker of this stage (or this worker, or this instance as in decode.1) dies as by kill -9."""
    delay: EdgeName | None = None
    """Messages on this edge come later, by `by`."""
    by: Duration | None = None
    """How much later."""
    drop_credit: EdgeName | None = None
    """Credit that comes back on this edge between workers is lost."""
    corrupt: EdgeName | None = None
    """Frames of this edge between workers arrive damaged."""
    full_disk: str | None = None
    """The device of this stage's disk tier takes nothing more."""
    at: Duration | None = None
    """Begins at this time after the first request; without `at` and `message`, with it."""
    message: PositiveInt | None = None
    """Begins with the n-th message on the edge; for kill, on `edge`, which begins or ends at the worker."""
    edge: EdgeName | None = None
    """For kill: the edge whose messages are counted."""
    lasts: Duration | None = Field(None, alias="for")
    """Ends after this time."""
    count: PositiveInt | None = None
    """So many messages, frames or deaths; 1 for corrupt and kill, else without end."""

    @property
    def kind(self) -> FaultKind:
        return next(kind for kind in FAULTS if getattr(self, kind) is not None)

    @property
    def target(self) -> str:
        """The edge, stage or worker that it strikes."""
        target: str = getattr(self, self.kind)
        return target

    @property
    def trigger(self) -> str:
        """The edge whose messages begin it; "" for one that begins at a time."""
        if self.message is None:
            return ""
        return self.edge or self.target

    @model_validator(mode="after")
    def _is_one(self) -> Fault:
        named = [kind for kind in FAULTS if getattr(self, kind) is not None]
        if len(named) != 1:
            raise ValueError(
                f"a fault is one of {', '.join(FAULTS)}" + (f", not {' and '.join(named)}" if named else "")
            )
        if (self.delay is None) != (self.by is None):
            raise ValueError("delay and by belong together, as in {delay: a -> b, by: 50ms}")
        if self.message is not None and self.at is not None:
            raise ValueError("a fault begins at a time (at) or with a message, not both")
        if named[0] == "kill" and (self.message is None) != (self.edge is None):
            raise ValueError("message and edge belong together, as in {kill: decode, edge: a -> b, message: 3}")
        if named[0] != "kill" and self.edge is not None:
            raise ValueError("edge belongs to kill: the others count the messages of their own edge")
        if named[0] == "full_disk" and self.message is not None:
            raise ValueError("full_disk begins at a time (at)")
        return self


class PipelineTest(Strict):
    """Tests of a pipeline. `flowinfer test` runs them in this process, with faults, mocks or cuts in virtual time."""

    pipeline: str
    """The file under test, relative to this one; where there is none, a pipeline of FlowInfer's, as prod.yaml."""
    overlays: list[str] = Field([])
    """Files that are laid over it, relative to this one."""
    set: dict[str, Any] = Field({})
    """Settings, as --set changes them."""
    cases_of: str | None = None
    """Another test file, whose cases run here too."""
    equivalent_to: str | None = None
    """Another pipeline, run without the faults: it must answer each case with the same text."""
    recording: str | None = None
    """A recording (flowinfer record) that mocks speak from, and that `replay` puts in, relative to this file."""
    cut: Cut | None = None
    """Tests only a part of the graph."""
    replay: bool = False
    """In a cut: what came into it in the recording comes in again, as cases named like the requests."""
    mock: list[Mock] = Field([])
    """Stages that a recording speaks for."""
    faults: list[Fault] = Field([])
    """What goes wrong meanwhile."""
    cases: list[Case] = Field([])
    """Requests, in order."""
    expect: RunExpect | None = None
    """What must hold of the run as a whole."""
    allow_local: bool = False
    """Lets the pipeline run code of local files."""

    @model_validator(mode="after")
    def _can_fail(self) -> PipelineTest:
        if not self.cases and self.cases_of is None and not self.replay:
            raise ValueError("there are no cases")
        expects = self.equivalent_to is not None or (self.expect is not None and bool(self.expect.model_fields_set))
        if not expects and (idle := [case.name for case in self.cases if case.expect is None]):
            raise ValueError(f"case {idle[0]!r} expects nothing, so it can't fail; give expect or equivalent_to")
        if self.replay and (self.cut is None or self.recording is None):
            raise ValueError("replay needs a cut and a recording")
        return self

    @property
    def is_plain(self) -> bool:
        """True when requests and answers are all there is: then the graph runs as one, in true time."""
        timed = any(case.at is not None or _is_timed(case.expect) for case in self.cases)
        return not (self.faults or self.mock or self.cut or self.expect or timed)

    @classmethod
    def load(cls, path: Path) -> PipelineTest:
        """Reads a file. Raises SpecError with every mistake in it."""
        return cls.read(path)[0]

    @classmethod
    def read(cls, path: Path) -> tuple[PipelineTest, Node]:
        """A file, and its tree, in which every value has its place. Raises SpecError with every mistake in it."""
        test, node = _read(cls, path)
        if test.cases_of is not None:
            shared = cls.load(path.parent / test.cases_of).cases
            test = test.model_copy(update={"cases": [*shared, *test.cases]})
        if test.recording is not None and not test.mock and not test.replay:
            text = "A recording is for mocks and for replay, and there is neither."
            raise SpecError([_problem("FI506", text, node, "recording")])
        names = [case.name for case in test.cases]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise SpecError([_problem("FI501", f"Two cases are called {twice!r}.", node, "cases")])
        return test, node

    def plan(self, path: Path) -> Plan:
        """The plan of the pipeline under test."""
        return self._plan(path.parent, self.pipeline)

    def other_plan(self, path: Path) -> Plan | None:
        """The plan of the pipeline that must answer the same, if there is one."""
        return self._plan(path.parent, self.equivalent_to) if self.equivalent_to else None

    def _plan(self, folder: Path, name: str) -> Plan:
        file, shipped = folder / name, SHIPPED / name
        sets = [f"{key}={_text(value)}" for key, value in self.set.items()]
        overlays = [folder / overlay for overlay in self.overlays]
        return load_plan(file if file.exists() or not shipped.exists() else shipped, overlays, sets, self.allow_local)


def _problem(code: str, message: str, node: Node, key: str) -> Problem:
    at = node.at(key)
    return Problem(code, message, at.where if at else node.mark)


def _is_timed(expect: Expect | None) -> bool:
    return expect is not None and (expect.latency, expect.first_token) != (None, None)


def _text(value: Any) -> str:
    """As --set takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(cls: type[PipelineTest], path: Path) -> tuple[PipelineTest, Node]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlowInferError(f"{path} can't be read: {error}") from error
    node, problems = read_tree(text, str(path))
    if node is None or problems:
        raise SpecError(problems)
    test, problems = validate(cls, node, "the test file", STRUCTURE)
    if test is None or problems:
        raise SpecError(problems)
    return test, node
