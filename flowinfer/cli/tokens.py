"""`flowinfer tokens`: what the model is told by a request: segments and ids, and which of them are control tokens."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowinfer.errors import FlowInferError
from flowinfer.message import Call

if TYPE_CHECKING:
    from flowinfer.stages.recipe_tokenize.stage import RecipeTokenize
    from flowinfer.text.tokenizer import TextTokenizer
    from flowinfer.text.traced import Segment

_DEFAULT = Path(__file__).parents[1] / "pipelines" / "prod.yaml"
_MANY = 2**20  # max_tokens of a request that names none; nothing is generated here


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--pipeline", type=click.Path(), default=str(_DEFAULT), help="Whose model and settings; prod.yaml.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set one value of the pipeline.")
def tokens(file: Any, pipeline: str, sets: tuple[str, ...]) -> None:
    """Show the segments and token ids of a chat request (JSON of OpenAI's or Anthropic's API; - for standard input).

    Control tokens are those that the template's author wrote. Beside them stands what encoding the rendered string as a
    whole would give, where a marker that a user typed becomes a control token.
    """
    stage = _stage(pipeline, sets)
    segments = stage.segments(_call(file.read()))
    _print(segments, Count.of(stage.tokenizer, segments), stage.tokenizer)


@dataclass(frozen=True)
class Count:
    """Ids of a prompt as the service encodes it, and of the same string encoded as a whole."""

    ids: list[int]
    naive: list[int]
    control: frozenset[int]

    @classmethod
    def of(cls, tokenizer: TextTokenizer, segments: list[Segment]) -> Count:
        whole = "".join(segment.text for segment in segments)
        naive = tokenizer.vocabulary.full.encode(whole, add_special_tokens=False).ids
        return cls(tokenizer.encode_segments(segments).tolist(), naive, tokenizer.control_ids)

    def forged(self) -> dict[int, tuple[int, int]]:
        """Control ids whose number differs: (here, naive)."""
        here, naive = Counter(self.ids), Counter(self.naive)
        return {id: (here[id], naive[id]) for id in sorted(self.control) if here[id] != naive[id]}


def _stage(pipeline: str, sets: tuple[str, ...]) -> RecipeTokenize:
    """The pipeline's recipe-tokenize, with its tokenizer and nothing around it.

    Mistakes elsewhere are no matter: a model that can't run here has a tokenizer, too.
    """
    from flowinfer.engine.hub import resolve
    from flowinfer.errors import SpecError
    from flowinfer.graph.checker import check
    from flowinfer.spec import load
    from flowinfer.stages.recipe_tokenize.stage import RecipeTokenize
    from flowinfer.text.tokenizer import load_tokenizer

    graph = check(load(pipeline, (), sets))
    found = next((stage for stage in graph.stages.values() if stage.kind == RecipeTokenize.kind), None)
    if found is None or not isinstance(config := found.config, RecipeTokenize.Config):
        if graph.problems:
            raise SpecError(graph.problems)
        raise FlowInferError(f"{pipeline} has no {RecipeTokenize.kind} stage.")
    context: Any = None  # only steps ask for one
    stage = RecipeTokenize(config, context)
    stage.use(load_tokenizer(resolve(config.model)))
    return stage


def _call(body: bytes) -> Call:
    """The call that a request becomes. Raises RequestError naming the field at fault."""
    from flowinfer.serve.anthropic.messages import MessageRequest, message_job
    from flowinfer.serve.openai.chat import ChatRequest, chat_job
    from flowinfer.serve.openai.decode import decode
    from flowinfer.serve.openai.job import Limits

    limits = Limits(models=(), max_requests=1024, default_max_tokens=_MANY, tools=True)
    given = _object(body)
    if is_anthropic(given):
        request = decode(MessageRequest, json.dumps({"model": "", "max_tokens": _MANY, **given}).encode())
        return message_job(request, "tokens", limits).calls[0]
    return chat_job(decode(ChatRequest, json.dumps({"model": "", **given}).encode()), "tokens", limits).calls[0]


def _object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except ValueError as error:
        raise FlowInferError(f"The file isn't JSON: {error}") from error
    if not isinstance(given, dict):
        raise FlowInferError("The file must hold one request, a JSON object.")
    return given


def is_anthropic(request: dict[str, Any]) -> bool:
    """Whether a request is in the form of Anthropic's API: what only that has shows it."""
    tools = _objects(request.get("tools"))
    blocks = [block for turn in _objects(request.get("messages")) for block in _objects(turn.get("content"))]
    return "system" in request or any("input_schema" in t for t in tools) or any("tool_use_id" in b for b in blocks)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _print(segments: list[Segment], count: Count, tokenizer: TextTokenizer) -> None:
    for segment in segments:
        kind = click.style("template", fg="magenta") if segment.control else click.style("text    ", fg="green")
        click.echo(f"{kind}  {json.dumps(segment.text, ensure_ascii=False)}")
    shown = [click.style(str(id), fg="magenta", bold=True) if id in count.control else str(id) for id in count.ids]
    click.echo("\n" + " ".join(shown) + "\n")
    for name, ids in (("", count.ids), ("encoded as one string: ", count.naive)):
        click.echo(f"{name}{len(ids)} tokens, {sum(id in count.control for id in ids)} of them control")
    for id, (here, naive) in count.forged().items():
        click.echo(click.style(f"{tokenizer.vocabulary.added[id]}: {here}, as one string {naive}", fg="yellow"))
