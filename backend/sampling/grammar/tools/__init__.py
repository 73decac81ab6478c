"""Builds grammars for llguidance from tools and a call format."""
