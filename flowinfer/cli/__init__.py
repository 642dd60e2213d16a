"""The command line: finds a command's module when it's called, and prints errors without a traceback."""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any, NamedTuple, NoReturn

import click

import flowinfer
from flowinfer.errors import FlowInferError, SpecError


class Entry(NamedTuple):
    """Where a command lives, and what it does in a few words (so that --help imports nothing)."""

    target: str
    summary: str


COMMANDS = {
    "run": Entry("flowinfer.cli.run:run", "Start the service of a pipeline file."),
    "chat": Entry("flowinfer.cli.chat:chat", "Chat with a model in the terminal."),
    "batch": Entry("flowinfer.cli.batch:batch", "Answer a file of requests offline."),
    "record": Entry("flowinfer.cli.record:record", "Record every message of some requests."),
    "replay": Entry("flowinfer.cli.record:replay", "Put a recording through a part of the graph again."),
    "trace": Entry("flowinfer.cli.trace:trace", "Show where one request of a service spent its time."),
    "top": Entry("flowinfer.cli.top:top", "Watch a running service: edges, stages, workers."),
    "tap": Entry("flowinfer.cli.tap:tap", "Show messages of an edge of a running service."),
    "logs": Entry("flowinfer.cli.logs:logs", "Show what the stages of a running service have logged."),
    "new": Entry("flowinfer.cli.new:new", "Write the files of a new stage."),
    "compare": Entry("flowinfer.cli.compare:compare", "Tell which of two graphs is better, and by how much."),
    "sweep": Entry("flowinfer.cli.sweep:sweep", "Run one graph at many settings over the same requests."),
    "experiment": Entry("flowinfer.cli.experiment:experiment", "Look at an experiment of a service, or end it."),
    "test": Entry("flowinfer.cli.test:test", "Run the tests beside pipelines and stages."),
    "plan": Entry("flowinfer.cli.plan:plan", "Show what a file would change in the running service."),
    "apply": Entry("flowinfer.cli.rewire:apply", "Make the running service run a file."),
    "set": Entry("flowinfer.cli.rewire:set_values", "Set values of the running service."),
    "swap": Entry("flowinfer.cli.rewire:swap", "Replace a stage of the running service."),
    "scale": Entry("flowinfer.cli.rewire:scale", "Change the replicas of a stage's worker."),
    "drain": Entry("flowinfer.cli.rewire:drain", "Let a stage end what it has; a fresh one takes over."),
    "rollback": Entry("flowinfer.cli.rewire:rollback", "Take the last change back."),
    "history": Entry("flowinfer.cli.history:history", "Show the journal of changes."),
    "check": Entry("flowinfer.cli.spec:check", "Find every mistake in a pipeline file."),
    "show": Entry("flowinfer.cli.spec:show", "Print the resolved file, and where each value came from."),
    "graph": Entry("flowinfer.cli.spec:graph", "Draw the graph as SVG, Mermaid or DOT."),
    "stages": Entry("flowinfer.cli.spec:stages", "List the stages, or one with its ports and settings."),
    "schema": Entry("flowinfer.cli.spec:schema", "Print the JSON Schema of pipeline files, for editors."),
    "explain": Entry("flowinfer.cli.spec:explain", "Explain an error code such as FI309."),
    "cache": Entry("flowinfer.cli.cache:cache", "Look at the KV blocks on disk, delete or carry them."),
    "tokens": Entry("flowinfer.cli.tokens:tokens", "Show the segments and token ids of a request."),
    "models": Entry("flowinfer.cli.models:models", "Get, list and inspect models."),
    "bench": Entry("flowinfer.cli.bench:bench", "Measure parts of the service by themselves."),
    "doctor": Entry("flowinfer.cli.doctor:doctor", "Show devices, and what each kernel needs of them."),
    "dashboards": Entry("flowinfer.cli.dashboards:dashboards", "Build and push the Grafana dashboards."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].target.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from flowinfer.spec.hints import did_you_mean

            ctx.fail(f"There is no command `{args[0]}`. {did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlowInferError as error:
            return self._told(ctx, error)
        except OSError as error:
            if error.errno in (None, errno.EPIPE):  # not of the machine; a closed pipe is click's own business
                raise
            place = f": {error.filename}" if error.filename else ""
            return self._told(ctx, FlowInferError(f"{error.strerror}{place}"))

    def _told(self, ctx: click.Context, error: FlowInferError) -> NoReturn:
        print_error(error)
        ctx.exit(1)


def print_error(error: FlowInferError) -> None:
    """Prints an error as people read it; mistakes in a file with their lines."""
    if isinstance(error, SpecError):
        from flowinfer.cli.report import render, wants_color

        click.echo(render(error.problems, {}, color=wants_color(sys.stderr)), err=True)
        return
    click.echo(click.style("error", fg="red", bold=True) + f": {error.message}", err=True)
    if error.help:
        click.echo(click.style(" help", fg="cyan", bold=True) + f": {error.help}", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(flowinfer.__version__, prog_name="flowinfer")
def main() -> None:
    """LLM inference as one typed, checked, re-wirable dataflow graph.

    Exit codes: 0 all is well, 1 a mistake in a file or a failure, 2 a mistake on the command line.
    """
