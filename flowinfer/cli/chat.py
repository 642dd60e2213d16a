"""`flowinfer chat`: a conversation in the terminal, or a line a turn from a pipe. Knows not how answers are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click
from rich.console import Console

from flowinfer.cli.conversation import LocalPartner, Messages, Options, Partner, RemotePartner
from flowinfer.cli.service_url import url_option
from flowinfer.errors import FlowInferError, RequestError

try:
    import readline  # `input` then edits lines and remembers them

    PROMPT = "\001\033[1;36m\002> \001\033[0m\002"  # readline must know which characters take no room
except ImportError:
    readline = None  # type: ignore[assignment]
    PROMPT = "> "

HELP = "/reset forgets the conversation, /system TEXT sets the system prompt, /quit leaves; Ctrl-C stops an answer."


@click.command()
@click.argument("file", required=False, type=click.Path())
@url_option("A running service, unused with FILE")
@click.option("--model", help="Model to ask; the first that the service lists.")
@click.option("--system", default="", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy.")
@click.option("--seed", type=int, help="Makes answers repeat themselves.")
@click.option("-o", "--overlay", "overlays", multiple=True, type=click.Path(), help="Lay this file over FILE.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set one value of FILE.")
@click.option("--allow-local", is_flag=True, help="Let FILE run code of local files.")
def chat(
    file: str | None,
    url: str,
    model: str | None,
    system: str,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    overlays: tuple[str, ...],
    sets: tuple[str, ...],
    allow_local: bool,
) -> None:
    """Chat with a running service, or with the pipeline of FILE in this process.

    Reads a turn a line from standard input when that isn't a terminal.
    """
    console = Console(highlight=False, soft_wrap=True)
    options = Options(max_tokens, temperature, seed)
    if file is None:
        partner: Partner = RemotePartner(url, model, options)
    else:
        partner = _local(console, file, overlays, sets, allow_local, options)
    try:
        failed = Conversation(partner, console, system, interactive=sys.stdin.isatty()).run()
    finally:
        partner.close()
    if failed:
        raise SystemExit(1)


class Conversation:
    """The turns so far and the terminal that they are held in."""

    def __init__(self, partner: Partner, console: Console, system: str, *, interactive: bool) -> None:
        self._partner = partner
        self._console = console
        self._system = system
        self._turns: Messages = []
        self._interactive = interactive
        self._failed = False

    def run(self) -> bool:
        """Talks until the end of input or /quit. True when an answer failed, and nobody was there to see it."""
        if self._interactive:
            self._console.print(f"[bold]{self._partner.model}[/bold]. {HELP}", style="dim")
        for line in self._lines():
            if line in ("/quit", "/exit"):
                break
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)
        return self._failed and not self._interactive

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = input(PROMPT if self._interactive else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                self._console.print()
                return
            yield line.strip()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._turns.clear()
        elif name == "/system":
            self._system = rest.strip()
        else:
            self._console.print(HELP, style="dim", markup=False)

    def _turn(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        said = self._stream(system + self._turns)
        if said:
            self._turns.append({"role": "assistant", "content": said})
        else:
            self._turns.pop()  # a question that got no answer would put two user turns in a row

    def _stream(self, messages: Messages) -> str:
        parts: list[str] = []
        answer = self._partner.answer(messages)
        try:
            for text in answer:
                parts.append(text)
                self._console.out(text, end="", highlight=False)
                self._console.file.flush()
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim", end="")
        except (FlowInferError, RequestError) as error:
            self._failed = True
            click.echo(f"{click.style('error', fg='red', bold=True)}: {error}", err=True)
        finally:
            answer.close()
        self._console.print()
        return "".join(parts)


def _local(
    console: Console, file: str, overlays: tuple[str, ...], sets: tuple[str, ...], allow_local: bool, options: Options
) -> Partner:
    from flowinfer.graph import load_plan
    from flowinfer.runtime.models import fetch_models

    plan = load_plan(file, overlays, sets, allow_local)
    fetch_models(plan)
    with console.status(f"Loading {plan.name}"):
        return LocalPartner(plan, options)
