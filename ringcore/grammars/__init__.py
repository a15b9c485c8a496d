"""Grammars compiled for the model's vocabulary, and the matchers that follow each completion."""

from ringcore.grammars.grammars import Grammars, Matcher, grammar_key, model_grammars

__all__ = ["Grammars", "Matcher", "grammar_key", "model_grammars"]
