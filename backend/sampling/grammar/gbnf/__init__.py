"""GBNF to grammars for llguidance."""
