"""The structure of a pipeline file as pydantic models: what each section may hold. A stage's Config says the rest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from flowinfer.spec.drain import DrainText
from flowinfer.spec.limits import parse_limits
from flowinfer.units import ByteSize, Duration, Share

NAME_PATTERN = r"^[a-z][a-z0-9_-]{0,62}$"
DEVICE_PATTERN = r"^(auto|cpu|cuda:[0-9]+)$"
DIGEST_PATTERN = r"^[0-9a-fA-F]{64}$"
EDGE_PATTERN = r"^\s*[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_]*)?\s*->\s*[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_]*)?\s*$"


def _auto(value: object) -> object:
    """`auto` means 0: chosen when the service starts."""
    return 0 if value == "auto" else value


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
AutoSize = Annotated[ByteSize, BeforeValidator(_auto, json_schema_input_type=Literal["auto"] | ByteSize)]
AutoCount = Annotated[int, BeforeValidator(_auto, json_schema_input_type=Literal["auto"] | int), Field(ge=0, le=1024)]


def _joined(ways: object) -> object:
    """[bucket, prefix] as one word; their order says nothing."""
    if not isinstance(ways, list):
        return ways
    if sorted(map(str, ways)) != ["bucket", "prefix"]:
        raise ValueError("only bucket and prefix go together: dispatch: [bucket, prefix]")
    return "bucket+prefix"


_WAY = Literal["pull", "bucket", "hash", "prefix"]
Dispatch = Annotated[
    Literal["pull", "bucket", "hash", "prefix", "bucket+prefix"],
    BeforeValidator(_joined, json_schema_input_type=_WAY | list[Literal["bucket", "prefix"]]),
]
LogLevel = Literal["debug", "info", "warning", "error"]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors."""

    # A check needs some of these, the schema all: each is built on first use, which saves a check 20 ms.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Tls(Section):
    """Certificate and key for HTTPS."""

    cert: str = Field(min_length=1)
    """A PEM file with the certificate and its chain."""
    key: str = Field(min_length=1)
    """A PEM file with the private key."""


class Sampling(Section):
    """How requests are sampled where they don't say. What is left out here, the model's generation_config.json says,
    and what that leaves out is as in the OpenAI API."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """The least set of tokens that is this likely."""
    top_k: int | None = Field(default=None, ge=0)
    """The likeliest tokens; 0 for all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Tokens that are at least this share as likely as the likeliest."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    """Divides the logits of tokens that were there; 1 is off."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Taken from the logits of tokens that were in the answer."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """As presence_penalty, for each time that a token was there."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Length of an answer; without it, a chat gets what the context leaves."""
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    """Makes equal requests give equal answers; without it, each gets a seed of its own."""


class State(Section):
    """What is kept for clients: stored responses, files and batches."""

    path: str = ""
    """Folder that outlives the service, which goes on with what lies there. Without it, they end with the service."""
    responses: Duration = Field(default=24 * 3600.0, gt=0)
    """How long a stored response is kept."""
    files: Duration = Field(default=30 * 24 * 3600.0, gt=0)
    """How long a file is kept that names no time of its own."""


class Serve(Section):
    """The HTTP front."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    apis: tuple[Literal["openai", "anthropic"], ...] = Field(default=("openai",), min_length=1)
    """Which APIs to offer."""
    max_requests: int = Field(default=256, ge=1)
    """Open requests beyond which new ones get 429."""
    request_timeout: Duration = 600.0
    """A request that takes longer fails with 504."""
    max_body: ByteSize = 16 * 2**20
    """Size of a request's body beyond which it gets 413; uploads of files may have 200 MiB."""
    keepalive: Duration = Field(default=15.0, gt=0)
    """A stream that has nothing to say for so long sends a sign of life, so that proxies don't cut it."""
    sampling: Sampling | None = None
    """Sampling defaults."""
    drain_timeout: Duration = 30.0
    """How long a stop waits for open requests, and `finish` of a drain that names no time."""
    stop_timeout: Duration = 30.0
    """How long a stop waits, behind the drain, for workers that still write cached blocks; others get 5 s."""
    drain: DrainText = ""
    """How what a change replaces ends, as in finish:30s,handoff:10s,replay:10s,abort; each time falls to the next."""
    log_level: LogLevel = "info"
    """From which level on the processes log; the terminal shows warnings and errors of these."""
    keys: dict[Name, Annotated[str, Field(pattern=DIGEST_PATTERN)]] = {}
    """Who may ask: by name, the SHA-256 of the client's API key (printf %s KEY | sha256sum). Nobody named: everybody.

    Each is a tenant, which shares no cached prompt with another. FLOWINFER_API_KEYS adds keys as they are.
    """
    key_requests: int | None = Field(default=None, ge=1)
    """Open requests of each key beyond which new ones get 429."""
    key_rate: int | None = Field(default=None, ge=1)
    """Requests a minute of each key beyond which new ones get 429."""
    cors: tuple[str, ...] = ()
    """Origins whose web pages may ask, as in https://chat.example.org; "*" for all."""
    tls: Tls | None = None
    """Serves HTTPS."""
    state: State = State()
    """Where stored responses, files and batches are kept, and for how long."""


class Worker(Section):
    """One process, or `replicas` equal ones, that runs the stages placed in it."""

    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    """auto, cpu, or cuda:0, cuda:1, ..."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """How many processes run these stages."""
    threads: AutoCount = 0
    """Torch threads of each process; auto shares the cores out. More than there are cores don't spin for each other."""
    kv_memory: AutoSize = 0
    """Memory for keys and values of each process; auto takes what the device has to spare."""
    log_level: LogLevel | None = None
    """From which level on this worker logs; without it, as `serve.log_level` says."""


class Curve(Section):
    """Keys that encrypt and authenticate TCP between workers (`curve_keypair` of ZeroMQ makes them)."""

    public_key: str = Field(pattern=r"^\S{40}$")
    """Z85 text of 40 characters."""
    secret_key_file: str = Field(min_length=1)
    """A file that holds the secret key; never the key itself."""


class Network(Section):
    """How workers reach each other."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """ipc: sockets of this host. tcp: sockets bound to `bind`."""
    bind: str = "127.0.0.1"
    """Address that tcp sockets bind to. Off this host it needs `curve`."""
    curve: Curve | None = None
    """Keys for tcp."""


class Place(Section):
    """Where a stage runs: in a worker, or beside another stage."""

    worker: str | None = None
    """Name of a worker."""
    with_: str | None = Field(default=None, alias="with")
    """Name of a stage: the same worker as that stage."""

    @model_validator(mode="after")
    def _one(self) -> Place:
        if (self.worker is None) == (self.with_ is None):
            raise ValueError("give either `worker` or `with`")
        return self


class StageEntry(Section):
    """One stage: what it is, how it is set, where it runs."""

    use: str = Field(min_length=1)
    """The kind (`flowinfer stages` lists them), or ./file.py:Class."""
    with_: dict[str, Any] | None = Field(default=None, alias="with")
    """Settings of the stage; `flowinfer stages KIND` shows them."""
    place: Place | None = None
    """Where it runs; without it, in the worker `front`."""


class Edge(Section):
    """How messages of one edge travel. Leave it empty for the defaults."""

    dispatch: Dispatch = "pull"
    """pull: whoever is free takes the next; bucket: a queue for each bucket; hash: equal keys, equal replica;
    prefix: who holds the prompt's prefix, unless its queue is longer than what that saves; [bucket, prefix]: both."""
    key: str | None = None
    """With dispatch `hash`: the field of the message that is hashed, as in cache_salt."""
    capacity: int | None = Field(default=None, ge=1)
    """Credit that each consumer grants: how many units may be under way to it."""
    unit: Literal["messages", "blocks"] | None = None
    """What the capacity counts; the consuming stage knows."""
    back: bool = False
    """Closes a loop, as from verify back to decode."""

    def by(self, way: Literal["bucket", "hash", "prefix"]) -> bool:
        """Whether messages are shared out that way, alone or with another."""
        return way in self.dispatch.split("+")


class ArmOverlay(Section):
    """What arm B of an experiment changes; laid over the file as an overlay is."""

    stages: dict[Name, Any] | None = None
    """Stages that differ, come, or go (`!drop`)."""
    edges: dict[str, Any] | None = None
    """Edges that differ, come, or go."""
    workers: dict[Name, Any] | None = None
    """Workers of arm B."""
    vars: dict[str, Any] | None = None
    """Variables with another value in arm B."""


class Experiment(Section):
    """Sends a part of the traffic another way through the graph, beside all other traffic, and tells which is better.

    Arm A is the file as it stands, arm B the same with `with` laid over it. Stages that don't differ are shared.
    """

    name: Name = "experiment"
    """Name in the journal, the metrics and the report."""
    with_: ArmOverlay | str = Field(alias="with")
    """What arm B changes: stages, edges, workers and vars, or the name of an overlay file."""
    split: Share | None = None
    """The share of sessions that arm B answers, as in 10%. A session stays in its arm."""
    mirror: Share | None = None
    """The share of sessions whose requests are copied to arm B, whose answers nobody gets."""
    stop_if: dict[str, str] = {}
    """What ends the experiment: `errors: "> 1%"`, `ttft_p95: "> 1.5x"` (of arm A) or `"> 800ms"`."""
    min_requests: int = Field(default=50, ge=1)
    """Requests that each arm must have answered before stop_if is looked at."""
    max_open: int = Field(default=4, ge=1)
    """With mirror: copies under way at a time; more are dropped and counted."""
    workers: Literal["own", "shared"] = "own"
    """own: stages of arm B that hold weights or memory run in workers of their own. shared: in those of arm A."""
    texts: int = Field(default=20, ge=0)
    """With mirror: pairs of answers that differ whose texts are kept to read."""

    @model_validator(mode="after")
    def _whole(self) -> Experiment:
        if (self.split is None) == (self.mirror is None):
            raise ValueError("give either `split` or `mirror`")
        return self

    @field_validator("stop_if")
    @classmethod
    def _limits(cls, written: dict[str, str]) -> dict[str, str]:
        parse_limits(written)
        return written


EdgeKey = Annotated[str, Field(pattern=EDGE_PATTERN)]


class Spec(Section):
    """A service: stages connected by edges, placed on workers."""

    flowinfer: Literal[1]
    """Version of this format."""
    name: Name = "service"
    """Name of the service."""
    extends: str | None = None
    """A file that this one is laid over, relative to this one."""
    vars: dict[str, Any] | None = None
    """Values that "${name}" stands for."""
    batch_invariant: bool = False
    """A request gets the same bytes alone and in any batch, cold and after a prefix hit, with and without drafts."""
    serve: Serve | None = None
    workers: dict[Name, Worker | None] | None = None
    stages: dict[Name, StageEntry] = Field(default_factory=dict)
    edges: dict[EdgeKey, Edge | None] = Field(default_factory=dict)
    network: Network | None = None
    experiment: Experiment | None = None
