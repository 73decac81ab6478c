"""The nouns shared by every layer: frozen values built on the standard library and msgspec."""
