"""The other backends of the machine: who holds what of its memory, and who may have how much."""
