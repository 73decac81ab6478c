"""Compiles GBNF and JSON schemas to matchers that tell which tokens may come next.

No MLX here: a matcher fills plain memory, and the sampler applies it.
"""
