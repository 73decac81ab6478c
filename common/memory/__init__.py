"""The memory of this process and of its machine."""
