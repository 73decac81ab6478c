"""Loads models, tokenizers and chat templates as LoadModel requests them."""
