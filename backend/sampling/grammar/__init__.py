"""Grammars: GBNF and JSON schemas, as text, to matchers that say which tokens may come next.

No MLX here: a matcher fills plain memory, and whoever samples applies it.
"""
