"""The report of a comparison: one HTML file with everything in it, to attach to a mail."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from flowinfer.compare import plots
from flowinfer.compare.answers import Difference
from flowinfer.compare.comparison import Comparison, Setup
from flowinfer.compare.figures import Figure
from flowinfer.compare.verdict import about_answers, change, sentence, value
from flowinfer.units import format_share

SHOWN_PAIRS = 20
STYLE = """
body { font: 15px/1.5 Inter, Helvetica, Arial, sans-serif; color: #1f2933; max-width: 900px; margin: 32px auto; }
body { padding: 0 20px; } h1 { font-size: 22px; line-height: 1.3; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 36px 0 8px; } p.sub { color: #66727f; margin: 0 0 20px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: #66727f; font-size: 13px; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid #e6eaee; } td.n, th.n { text-align: right; }
td.n { white-space: nowrap; }
.B { color: #2e7d32; font-weight: 600; } .A { color: #b4540a; font-weight: 600; } svg { width: 100%; height: auto; }
pre { background: #f3f5f8; padding: 12px; overflow-x: auto; font-size: 13px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; margin: 4px 0 20px; }
.pair div { background: #f3f5f8; padding: 10px 12px; white-space: pre-wrap; font-size: 14px; }
mark { background: #fde7c8; }
"""


def html(comparison: Comparison) -> str:
    """The report as text."""
    title = f"{comparison.setup.a} against {comparison.setup.b}"
    return page(title, "".join(_body(comparison)))


def page(title: str, body: str) -> str:
    """A page with everything in it, styled as all reports are."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n"


def _body(comparison: Comparison) -> Iterator[str]:
    setup, a, b = comparison.setup, comparison.a, comparison.b
    yield f"<h1>{escape(comparison.headline)}</h1>"
    yield f"<p class=sub>A is {escape(setup.a)}, B is {escape(setup.b)}. {escape(_how(comparison))}</p>"
    yield f"<h2>Change from A to B</h2>{plots.intervals(comparison.figures)}"
    yield _table(comparison.figures)
    yield "<h2>Where the time goes</h2>"
    yield plots.distribution("Requests whose first token came within", a.ttft_s, b.ttft_s)
    yield plots.distribution("Requests whose tokens followed each other within", a.itl_s, b.itl_s)
    yield plots.sequence("Whole answer in ms, in the order of the requests", a.latency_s, b.latency_s)
    yield f"<h2>Answers</h2><p>{escape(about_answers(comparison.answers).capitalize())}.</p>"
    yield from _pairs(comparison.answers.differences)
    yield from (f"<p>A failed: {escape(text)}</p>" for text in comparison.answers.failed_a[:SHOWN_PAIRS])
    yield from (f"<p>B failed: {escape(text)}</p>" for text in comparison.answers.failed_b[:SHOWN_PAIRS])
    yield f"<h2>What differs in the files</h2><pre>{escape(setup.changes) or 'Nothing.'}</pre>"


def _how(comparison: Comparison) -> str:
    setup = comparison.setup
    if setup.kind != "compare":
        return _how_observed(setup)
    where = "as services of their own, over HTTP" if setup.real else "in one process"
    return (
        f"{setup.num_requests} requests ({setup.requests}), {setup.rounds} times, {setup.in_flight} at a time, "
        f"both sides in turn, {where}. Goodput counts requests whose first token came within "
        f"{setup.limit.ttft_s * 1e3:g} ms and each further one within {setup.limit.itl_s * 1e3:g} ms. "
        f"Intervals: paired bootstrap, {setup.resamples} resamples, {setup.confidence:.0%}. "
        f"{setup.machine}; FlowInfer {setup.version}, {setup.when}."
    )


def _how_observed(setup: Setup) -> str:
    how = "answered by arm B" if setup.kind == "split" else "copied to arm B, each compared with its copy"
    end = f"{setup.note}. " if setup.note else ""
    drawn = "by sessions, each arm by itself" if setup.kind == "split" else "by sessions, in pairs"
    return (
        f"{setup.num_requests} requests of {setup.requests}, "
        f"of which {format_share(setup.share)} of the sessions were {how}. "
        f"Rates are for a second in which a request was open. Goodput counts requests whose first token came within "
        f"{setup.limit.ttft_s * 1e3:g} ms and each further one within {setup.limit.itl_s * 1e3:g} ms. "
        f"Intervals: bootstrap {drawn}, {setup.resamples} resamples, {setup.confidence:.0%}. {end}"
        f"{setup.machine}; FlowInfer {setup.version}, begun {setup.when}."
    )


def _table(figures: list[Figure]) -> str:
    rows = "".join(
        f"<tr><td>{escape(f.title)}<td class=n>{value(f, f.a)}<td class=n>{value(f, f.b)}"
        f"<td class=n>{escape(change(f))}<td class={f.better or 'none'}>{escape(sentence(f))}"
        for f in figures
    )
    return f"<table><tr><th>figure<th class=n>A<th class=n>B<th class=n>change, 95 % interval<th>verdict{rows}</table>"


def _pairs(differences: list[Difference]) -> Iterator[str]:
    """Each request once: other rounds of it read the same or nearly so."""
    readable = [difference for difference in differences if difference.a or difference.b]
    seen = list({difference.request: difference for difference in reversed(readable)}.values())[::-1]
    for difference in seen[:SHOWN_PAIRS]:
        yield f"<p class=sub>Request {escape(difference.request)}: first at {difference.unit} {difference.at}</p>"
        texts = "".join(f"<div>{_marked(text, difference.shared)}</div>" for text in (difference.a, difference.b))
        yield f"<div class=pair>{texts}</div>"
    if len(seen) > SHOWN_PAIRS:
        yield f"<p class=sub>{len(seen) - SHOWN_PAIRS} more are in the JSON.</p>"


def _marked(text: str, shared: int) -> str:
    return escape(text[:shared]) + (f"<mark>{escape(text[shared:])}</mark>" if text[shared:] else "")
