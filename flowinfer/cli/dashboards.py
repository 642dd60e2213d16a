"""`flowinfer dashboards`: writes the Grafana dashboard, or puts it into a Grafana. What it shows stands in observe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flowinfer.errors import FlowInferError

DEFAULT_FILE = Path("dashboards/flowinfer.json")


@click.group()
def dashboards() -> None:
    """Build the Grafana dashboard from the metric definitions, or push it to a Grafana."""


@dashboards.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=DEFAULT_FILE, show_default=True)
@click.option("--check", is_flag=True, help="Write nothing; fail if the file isn't what would be written.")
def build(output: Path, check: bool) -> None:
    """Write the dashboard as JSON."""
    from flowinfer.observe import grafana

    if not check:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(grafana.text(), encoding="utf-8")
        click.echo(f"Wrote {output}.")
    elif not output.exists() or output.read_text(encoding="utf-8") != grafana.text():
        raise FlowInferError(f"{output} is out of date.", help="Run `flowinfer dashboards build`.")


@dashboards.command()
def metrics() -> None:
    """Print all metrics as a Markdown table."""
    from flowinfer.observe import catalog

    click.echo(catalog.markdown(), nl=False)


@dashboards.command()
@click.option("--url", envvar="GRAFANA_URL", required=True, help="As in http://localhost:3000; or GRAFANA_URL.")
@click.option("--token", envvar="GRAFANA_TOKEN", help="A service account's token; or GRAFANA_TOKEN.")
@click.option("--folder", help="UID of the folder to put it in.")
def push(url: str, token: str | None, folder: str | None) -> None:
    """Create the dashboard in a Grafana, or replace it there."""
    from flowinfer.observe import grafana

    model: dict[str, Any] = {"dashboard": grafana.dashboard() | {"id": None}, "overwrite": True}
    if folder:
        model["folderUid"] = folder
    answer = _push(url, token, model)
    click.echo(f"{url.rstrip('/')}{answer.get('url', '')}")


def _push(url: str, token: str | None, model: dict[str, Any]) -> dict[str, Any]:
    from grafana_client.api import GrafanaApi
    from grafana_client.client import GrafanaException

    try:
        api = GrafanaApi.from_url(url, credential=token)
        answer: dict[str, Any] = api.dashboard.update_dashboard(model)
    except (GrafanaException, OSError, ValueError) as error:
        raise FlowInferError(f"Grafana at {url} refused: {error}.", help="Check --url and --token.") from error
    return answer
