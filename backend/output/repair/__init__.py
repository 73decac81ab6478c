"""Second readings of calls that no reader understood, from the whole text of a block."""
