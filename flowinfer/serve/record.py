"""Writes what happens to requests into the metrics. Labels are bound once; the per-token path is two calls."""

from __future__ import annotations

from flowinfer.errors import RequestError
from flowinfer.message import Finish, Piece
from flowinfer.observe import metrics
from flowinfer.serve.ledger import Entry, Ledger


class Record:
    """The gateway's metrics. Tokens and latencies are counted where the client's answer is assembled."""

    def __init__(self) -> None:
        self._received = metrics.counter("requests_received_total")
        self._finished = metrics.counter("requests_finished_total")
        self._failed = metrics.counter("requests_failed_total")
        self._rejections = metrics.counter("admission_rejections_total")
        self._cancellations = metrics.counter("cancellations_total")
        self._late = metrics.counter("late_pieces_total")
        self._running = metrics.gauge("requests_running")
        self._waiting = metrics.gauge("requests_waiting")
        self._prompt_tokens = metrics.counter("prompt_tokens_total")
        self._generated = metrics.counter("generation_tokens_total")
        self._first = metrics.histogram("time_to_first_token_seconds")
        self._between = metrics.tally("inter_token_latency_seconds")
        self._per_token = metrics.histogram("time_per_output_token_seconds")
        self._whole = metrics.histogram("request_latency_seconds")
        self._pending_tokens = 0
        self._levels = (-1, -1)

    def received(self, count: int) -> None:
        self._received.inc(count)

    def refused(self, reason: str) -> None:
        self._rejections.labels(reason=reason).inc()

    def late(self) -> None:
        self._late.inc()

    def failed(self, error: RequestError) -> None:
        self._failed.labels(code=error.code or str(error.status)).inc()

    def cancelled(self, cause: str, count: int) -> None:
        if count:
            self._cancellations.labels(cause=cause).inc(count)

    def piece(self, ledger: Ledger, entry: Entry, piece: Piece, now: float) -> None:
        """Notes new text: first or next."""
        if not entry.first_at:
            ledger.start(entry, now)
            self._first.observe(now - entry.opened)
        else:
            self._between.observe(now - entry.last_at)
        entry.last_at = now
        entry.tokens += len(piece.tokens)
        self._pending_tokens += len(piece.tokens)

    def finished(self, entry: Entry, finish: Finish, now: float) -> None:
        """Notes the end. Tokens that no piece named (a stop token has no text) are counted here."""
        self._pending_tokens += max(0, finish.completion_tokens - entry.tokens)
        self._finished.labels(reason=finish.reason).inc()
        self._prompt_tokens.inc(finish.prompt_tokens)
        self._whole.observe(now - entry.opened)
        if finish.completion_tokens > 1:
            self._per_token.observe((now - entry.first_at) / (finish.completion_tokens - 1))

    def levels(self, num_open: int, num_started: int) -> None:
        """Sets the gauges and adds the tokens of the step, once for all its requests."""
        if self._pending_tokens:
            self._generated.inc(self._pending_tokens)
            self._pending_tokens = 0
        levels = (num_started, num_open - num_started)
        if levels != self._levels:
            self._levels = levels
            self._running.set(levels[0])
            self._waiting.set(levels[1])
