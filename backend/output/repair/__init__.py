"""Rereads calls that no reader understood, using the whole text of a block."""
