"""Heads: small networks that draft from the hidden states of a large one."""
