"""The compiled grammars of one model: compiled once in a thread of the pool, then started from a cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from flowinfer.engine.grammar.base import CompiledGrammar, GrammarEngine, Matcher
from flowinfer.message import Grammar

_Key = tuple[str, str]


class Grammars:
    """A cache of the `capacity` grammars that were used last. The engine is made on first use, by whichever thread."""

    def __init__(self, load: Callable[[], GrammarEngine], capacity: int = 256) -> None:
        self._load, self._capacity = load, capacity
        self._engine: GrammarEngine | None = None
        self._loading, self._lock = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[_Key, CompiledGrammar] = OrderedDict()

    def compile(self, grammar: Grammar) -> None:
        """Makes the grammar ready. Slow, so for a thread of the pool. Raises RequestError naming the field at fault."""
        self._find(grammar)

    def start(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of the grammar; quick where `compile` was called not long ago."""
        return self._find(grammar).start()

    def _find(self, grammar: Grammar) -> CompiledGrammar:
        key = (grammar.kind, grammar.text)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        compiled = self._get_engine().compile(grammar)
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
        return compiled

    def _get_engine(self) -> GrammarEngine:
        with self._loading:
            if self._engine is None:
                self._engine = self._load()
            return self._engine
