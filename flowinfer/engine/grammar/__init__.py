"""Structured output: what a grammar allows next. Engines plug in behind `GrammarEngine`; llguidance is the default."""

from flowinfer.engine.grammar.base import CompiledGrammar, GrammarEngine, Matcher, grammar_error
from flowinfer.engine.grammar.library import Grammars

__all__ = ["CompiledGrammar", "GrammarEngine", "Grammars", "Matcher", "grammar_error"]
