"""Translates JSON schemas to grammars for llguidance."""
