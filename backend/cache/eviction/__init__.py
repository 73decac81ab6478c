"""Which parts of a full prompt cache go first."""
