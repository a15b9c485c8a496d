"""Grammars, compiled for the model's vocabulary, and how far each completion has come in its own."""

from ringcore.grammars.grammars import Grammars, Matcher, grammar_key, model_grammars

__all__ = ["Grammars", "Matcher", "grammar_key", "model_grammars"]
