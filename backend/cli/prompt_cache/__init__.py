"""The command `cache`: the prompt cache of a running backend."""
