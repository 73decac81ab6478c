"""`fit`: what a model takes on this machine, before it is loaded."""
