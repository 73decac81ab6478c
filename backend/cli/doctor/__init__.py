"""A look at the machine: what is well, what is not, and the command that mends it."""
