"""The command `cache`: what the prompt cache of a running backend holds."""
