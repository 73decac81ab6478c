"""Turns calls into results: generation, embedding, scoring, reranking, and their parts.

They raise `UnsupportedError` for a model of another kind, `ModelReplacedError` when another model
replaces theirs, `ContextLengthError` for a prompt that leaves no room, and otherwise
`InvalidRequestError` with the field's name.
"""
