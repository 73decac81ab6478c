"""The nouns that every layer shares: frozen values of the standard library and of msgspec."""
