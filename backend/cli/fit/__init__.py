"""`fit`: the memory of a model on this machine, before a load."""
