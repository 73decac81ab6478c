"""Translates GBNF to grammars for llguidance."""
