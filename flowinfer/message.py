"""Every message that crosses an edge, and every control event that travels beside the edges. Knows nothing of sockets.

Messages are msgspec structs; token ids and other numbers in bulk are numpy arrays, which the codec carries as buffers.
Per-request messages (Call, Prompt, Sequence) travel one by one; per-step messages (Tokens, Text) carry a whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

type_registry: dict[str, type[Message]] = {}
Ids = NDArray[np.int32]
if TYPE_CHECKING:
    TextOrIds = str | Ids
else:
    TextOrIds = Any  # msgspec takes no union of str and an array
FinishReason = Literal["stop", "length", "abort"]


class Message(msgspec.Struct, array_like=True, kw_only=True, gc=False):  # never in cycles: halves the cost of decoding
    """Base of all that travels. `local` messages hold references to device memory and never leave their worker."""

    local: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_registry[cls.__name__] = cls


# ---------------------------------------------------------------------------------------------- what a request asks for


class ReplyFormat(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """How the model writes reasoning and tool calls (names of flowinfer.text.reply); set by recipe-tokenize for chats.

    thinking: the prompt ends inside reasoning.  thought: it has closed it, so that no reasoning should follow.
    strings: of each tool, the parameters that hold text.
    """

    reasoning: str = ""
    tools: str = ""
    thinking: bool = False
    strings: dict[str, tuple[str, ...]] = {}
    thought: bool = False


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What the output must match. text: a JSON Schema, a regular expression, a JSON list of choices, or Lark or GBNF.

    nested: JSON [Lark, kind, text] of a Lark grammar in which @body stands for the grammar of that kind and text.
    param: the field of the request that it came in, for errors.  after: the token behind which the grammar begins, as
    the end of reasoning; None: it binds from the first token.  opens: the token that leads to `after`; where the output
    doesn't begin with it, the grammar binds from the first token too; None: the prompt has it already.
    """

    kind: Literal["json", "regex", "choice", "lark", "nested"]
    text: str
    param: str = "response_format"
    after: int | None = None
    opens: int | None = None


class ToolChoice(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """Which tools an answer may call, and whether it must. names: of those that it may; () for all of them."""

    required: bool = False
    names: tuple[str, ...] = ()
    parallel: bool = True  # False: one call at most


class Sampling(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """How to choose tokens. temperature 0 is greedy. Penalties as OpenAI's; repetition_penalty as in CTRL (2019)."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the gateway draws one, so that a request replayed inside the service repeats itself
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # number of top alternatives beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens, whose KV is then computed anew
    grammar: Grammar | None = None
    reply: ReplyFormat | None = None  # None: all of the answer is text


class Call(Message):
    """A request as it came in: `messages` for a chat, or `prompt` (text or ids) for a completion. Made by the gateway.

    id is unique in the life of the service. deadline is in seconds of the host's monotonic clock, None for no limit.
    session: what requests of one session share (a user, a conversation), for an experiment that splits by it.
    arm: "b" for what goes the way of an experiment's arm B; the loop keeps it through all stages.
    hops: from worker to worker, so far; the loop counts them.
    """

    id: str
    sampling: Sampling
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: TextOrIds | None = None
    cache_salt: str = ""
    cache_class: str = "chat"
    cache_keep_s: float | None = None  # how long its blocks stay after their last use; 0: store nothing
    template_args: dict[str, Any] = {}
    deadline: float | None = None
    tool_choice: ToolChoice = ToolChoice()
    session: str = ""
    arm: str = ""
    cache_in_memory: bool = False  # its blocks are kept in memory only, never on disk or in an object store
    hops: int = 0


class PrefixHint(msgspec.Struct, array_like=True, kw_only=True):
    """What the cache is believed to hold of a prompt: owners of its leading blocks. A hint, never a promise."""

    hashes: list[bytes] = []  # chain hashes of every full block of the prompt, cached or not
    owners: list[str] = []  # owners[i]: worker instance that holds block i; shorter than hashes


class Progress(msgspec.Struct, array_like=True, kw_only=True):
    """What a sequence had given when it left a worker, so that another can go on with it.

    output: its tokens so far.  giver: the worker instance that it left. The rest is its usage so far.
    hits, trials: how well its guessed tokens did, as spec-verify's draft length remembers it.
    """

    output: Ids
    giver: str = ""
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    hits: float = 0.0
    trials: float = 0.0


class Prompt(Message):
    """A tokenized request on its way to the model. The facets below are filled in by the stages that add them.

    progress: of a sequence that was being answered elsewhere before; None: its first token is still to come.
    """

    id: str
    tokens: Ids
    sampling: Sampling
    cache_salt: str = ""
    cache_class: str = "chat"
    cache_keep_s: float | None = None  # how long its blocks stay after their last use; 0: store nothing
    deadline: float | None = None
    bucket: str | None = None  # facet `bucket`
    prefix: PrefixHint | None = None  # facet `prefix`
    arm: str = ""  # as in Call
    progress: Progress | None = None
    cache_in_memory: bool = False  # its blocks are kept in memory only, never on disk or in an object store
    hops: int = 0  # as in Call

    @property
    def history(self) -> Ids:
        """Tokens of the prompt and of the answer so far."""
        return self.tokens if self.progress is None else np.concatenate([self.tokens, self.progress.output])


class TokenLogprob(msgspec.Struct, array_like=True):
    """log-probability (natural, after temperature 1, before filters) of a token, with the best alternatives."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class KVHandle(msgspec.Struct, array_like=True, kw_only=True):
    """Where the KV of a sequence lies: int32 block ids in the arena of `layout`, owned by `owner` at `generation`.

    ways: transports by which another worker can have it, best first.  computed_at: by the host's monotonic clock.
    partial: numbers of the blocks whose window keys and open groups aren't what their names say.
    """

    layout: str
    owner: str
    generation: int
    blocks: Ids
    num_tokens: int  # tokens whose KV is computed: the prompt less its last one
    cached_tokens: int = 0  # of those, how many were reused
    ways: list[str] = []
    computed_at: float = 0.0
    partial: list[int] = []


class Sequence(Prompt):
    """A prompt whose KV (all tokens but the last) is computed and can be decoded."""

    kv: KVHandle | None = None
    prompt_logprobs: list[TokenLogprob] = []  # of every token but the first, where the sampling asks for them


# ------------------------------------------------------------------------------------ what comes out, a step at a time


class Opening(msgspec.Struct, array_like=True, kw_only=True):
    """What detokenize and the gateway must know of a sequence; travels with its first Tokens.

    cached_tokens of the prompt were reused; stored_tokens of the others lie in the prefix cache now.
    first_token: the prompt's, where prompt_logprobs of the others are there.
    before: what the worker `giver` gave of a sequence that goes on here, should that worker's last tokens be lost.
    """

    id: str
    sampling: Sampling
    prompt_tokens: int
    cached_tokens: int
    stored_tokens: int = 0
    first_token: int = 0
    prompt_logprobs: list[TokenLogprob] = []
    before: Ids | None = None
    giver: str = ""


class Finish(msgspec.Struct, array_like=True, kw_only=True):
    """The last word on a sequence: why it ended and what it used."""

    reason: FinishReason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    stop: str | int | None = None  # the stop string or token id that was met
    reasoning_tokens: int = 0  # of completion_tokens


class Tokens(Message):
    """The tokens that one decode step yielded: sequence ids[i] got counts[i] of the flat `tokens`, in order.

    positions[i]: how many tokens of the answer come before the first of these; None: all that have come so far.
    finished maps an index into ids to its Finish; opened describes sequences that appear for the first time;
    logprobs, where a sequence asked for them, maps an index into ids to one TokenLogprob a token.
    """

    step: int
    ids: list[str]
    counts: Ids
    tokens: Ids
    opened: list[Opening] = []
    finished: dict[int, Finish] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    positions: Ids | None = None


class TextLogprob(msgspec.Struct, array_like=True):
    """TokenLogprob with tokens as text; `data` are the token's bytes, which may be half a character."""

    text: str
    logprob: float
    data: bytes
    top: list[tuple[str, float, bytes]] = []


class CallPart(msgspec.Struct, array_like=True, kw_only=True):
    """New text of tool call `index` of an answer. Its first part carries id and name; arguments join to JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class PromptToken(msgspec.Struct, array_like=True):
    """A token of the prompt as text, `data` its bytes. top: id, text and logprob of the best alternatives.

    logprob: natural, of this token behind all before it; None for the first.
    """

    token: int
    text: str
    data: bytes
    logprob: float | None
    top: list[tuple[int, str, float]] = []


class Opened(msgspec.Struct, array_like=True, kw_only=True):
    """What the prompt of a sequence took. prompt: its tokens, where their log-probabilities were asked for."""

    prompt_tokens: int
    cached_tokens: int = 0
    stored_tokens: int = 0
    prompt: list[PromptToken] = []


class Piece(msgspec.Struct, array_like=True, kw_only=True):
    """New text of one sequence, always whole characters. The first piece carries `opened`, the last `finish`.

    An answer is reasoning, then text, then tool calls, each of which may be missing; so is a piece.
    """

    id: str
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TextLogprob] = []
    finish: Finish | None = None
    reasoning: str = ""
    calls: list[CallPart] = []
    opened: Opened | None = None


class Text(Message):
    """The text that one step yielded, over all sequences."""

    step: int
    pieces: list[Piece]


# ------------------------------------------------------ local messages: the decode loop, batch rows by slot, no copying


class Drafts(NamedTuple):
    """What a step had drafted by itself before it: tokens int32 [n, D] of those of its n sequences that found some."""

    tokens: Ids
    found: NDArray[np.bool_]


class Logits(Message):
    """Logits of one step, float32 [rows, vocab] on the device. Sequence in slots[i] owns rows starts[i]:starts[i+1].

    chosen: tokens of the rows, where the step sampled them itself; then there are no logits.
    features: [rows, n] on the device, what the drafter wants to know of the target's layers (Batch.feature_layers).
    seconds: that the step took, 0 where nobody waited for it.
    drafts: where the step made its drafts by itself: what it put to the test, the first of them in its rows.
    """

    local: ClassVar[bool] = True
    step: int
    slots: Ids
    starts: Ids
    logits: Any
    features: Any = None
    chosen: Ids | None = None
    seconds: float = 0.0
    drafts: Drafts | None = None


class Proposal(Message):
    """What to run next: for slots[i], its last accepted token and counts[i]-1 drafts, flat in `tokens`."""

    local: ClassVar[bool] = True
    step: int
    slots: Ids
    counts: Ids
    tokens: Ids


# --------------------------------------------------------------------------------- control: ahead of data, never queued


class Event(Message):
    """Base of control events. They travel on the control channel and reach every stage whose `observe` takes them."""

    bulk: ClassVar[bool] = False


class Cancel(Event):
    """The client of these requests went away, or their deadline passed: stop the work and free what they hold."""

    ids: list[str]


class Ended(Event):
    """These requests have had their End or Failure; whatever comes late for them is refused."""

    ids: list[str]


class Failure(Event):
    """A request failed in a stage; sent to the gateway. status and code as in RequestError."""

    id: str
    status: int = 500
    message: str = ""
    code: str = ""
    param: str | None = None
    stage: str = ""
    retry_after_s: float | None = None


class Credit(Event):
    """The consumer instance of an edge lets this producer send `amount` more in `lane` (unit: the edge's).

    ids: requests that have left the consumer, so that its death no longer harms them.
    """

    edge: str
    lane: str
    amount: int
    ids: list[str] = []


class Moved(Event):
    """These requests are now held by `worker`; goes to the gateway, whose ledger fails them if that one dies.

    shared: the worker that held them before still does, so that the death of one of the two harms nobody.
    hops: of each, how often it has changed workers: what two workers say may come in any order.
    """

    ids: list[str]
    worker: str = ""
    generation: int = 0
    shared: bool = False
    hops: list[int] = []


class WorkerDown(Event):
    """This generation of a worker is dead: free what it leased, fail what it held, refuse what it has in flight."""

    worker: str
    generation: int


class WorkerUp(Event):
    """A worker (again) listens at these endpoints; sent by the supervisor to its peers."""

    worker: str
    generation: int
    data: str
    control: str


class Drain(Event):
    """The service is about to stop: the gateway admits nothing new and finishes what is open."""


class Serving(Event):
    """All workers are up and connected: the gateway may admit."""


class SetArms(Event):
    """Tells the gateway whether requests may go to arm B of the experiment. abort: those that still do are failed."""

    open: bool
    abort: bool = False


class ArmsClosed(Event):
    """The gateway's answer to SetArms(open=False), to "supervisor": nothing of arm B is open any more."""


class Breach(Event):
    """Arm B of this experiment broke a limit of `stop_if`: to "supervisor", which takes the arm down."""

    experiment: str
    reason: str


class LeaseQuery(Event):
    """`owner` died: which of its arena blocks do you still read? Stages answer by LeaseReport to "supervisor"."""

    owner: str


class LeaseReport(Event):
    """Block ids of `owner` that this worker still reads, by request. `final`: the last report of this worker."""

    owner: str
    leases: dict[str, list[int]] = {}
    final: bool = False


class Stats(Event):
    """The metric samples (name, labels, value) of one worker; goes to the gateway, which serves them on /metrics."""

    worker: str
    samples: list[tuple[str, dict[str, str], float]]


class TraceAsk(Event):
    """Asks every worker what its stages did for a request; a worker that isn't tracing yet begins to."""

    id: str


class TracedStep(msgspec.Struct, array_like=True, kw_only=True):
    """One step of a stage; times of the host's monotonic clock. shared: of a whole batch, which knows only slots."""

    stage: str
    started: float
    ended: float
    batch: int = 0
    shared: bool = False


class TraceTold(Event):
    """A worker's answer to TraceAsk; goes to the gateway. since: when it began to trace."""

    worker: str
    id: str
    since: float
    steps: list[TracedStep] = []


class BlockStored(Event):
    """`owner` now holds these prefix-cache blocks (chain hashes, in chain order)."""

    owner: str
    hashes: list[bytes]


class BlockRemoved(Event):
    """`owner` no longer holds these blocks."""

    owner: str
    hashes: list[bytes]


class BlocksCleared(Event):
    """`owner` holds no cached block any more."""

    owner: str


class KVRelease(Event):
    """The lessee is done with the blocks of this request. `commits`: the owner's blocks that it filled, and names."""

    id: str
    lessee: str
    commits: list[tuple[int, bytes]] = []


class KVPin(Event):
    """Asks the owner to hold these cached blocks for a reader, who copies them. Answered by KVPinned."""

    id: str
    reader: str
    hashes: list[bytes]


class KVPinned(Event):
    """The blocks (arena ids) pinned for request `id`: those of the leading hashes that the owner still had.

    partial: places of those of which only the compressed entries are there.
    """

    id: str
    owner: str
    blocks: Ids
    partial: list[int] = []


class KVUnpin(Event):
    """The reader has copied the blocks of request `id`."""

    id: str
    reader: str


class Leave(Event):
    """This worker is about to go: stages that hold running requests send them elsewhere. Sent by it to itself.

    handoff: with their KV, to a worker that runs the same stages.  replay: to be prefilled again.  stay: it doesn't go.
    """

    mode: Literal["handoff", "replay", "stay"]


class HandOff(Event):
    """Offers a running sequence with its KV to another worker, which answers by KVRelease once it has all of it."""

    bulk: ClassVar[bool] = True
    sequence: Sequence


class HandOffRefused(Event):
    """The worker that was offered this sequence has no room for it now: it stays where it is."""

    id: str
    by: str


class Replay(Event):
    """Asks a prefill worker to compute a running sequence again, from its prompt and its tokens so far."""

    bulk: ClassVar[bool] = True
    prompt: Prompt


class KVRecall(Event):
    """The owner is about to go: copy the blocks of these requests that you read from it, and release them."""

    ids: list[str]


class KVOffer(Event):
    """A prompt is about to be computed whose KV this worker will decode: where it may go, if there's room already.

    ways: transports by which the owner can give it, best first.  traits: what its layout is, to name where two differ.
    names: chain hashes of its leading blocks, as far as they are known.
    """

    id: str
    owner: str
    generation: int
    layout: str
    num_tokens: int
    ways: list[str]
    traits: dict[str, str] = {}
    names: list[bytes] = []


class KVFetch(Event):
    """Asks the owner to push the KV of request `id` as it is computed: block i over blocks[i] of the taker's pool.

    first: the taker has those before.  ticket: names this transfer, among all of the service.  address: of the taker's
    pool, as its half of the transport says it.  id "": of no request; the owner makes ready to push by this transport.
    """

    id: str
    to: str
    generation: int
    ticket: int
    transport: str
    blocks: Ids
    first: int = 0
    address: bytes = b""


class KVData(Event):
    """One block of a fetched request: `index` counts from the start of the sequence; bytes as the layout says.

    check: xxh3_64 of the bytes.
    """

    bulk: ClassVar[bool] = True  # travels with the data, behind which no cancel has to wait
    id: str
    ticket: int
    index: int
    layout: str
    data: NDArray[np.uint8]
    check: int


class KVPushed(Event):
    """Blocks from `first` on lie in the taker's pool, where the owner wrote them. checks: xxh3_64 of each, 0: none."""

    id: str
    ticket: int
    first: int
    checks: list[int]


class KVStopped(Event):
    """Nothing more comes of this request by this ticket, and nothing is written any more.

    reason: why it failed; "": the owner was told to, or the request goes elsewhere.
    """

    id: str
    ticket: int
    reason: str = ""
