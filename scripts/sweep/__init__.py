"""Tries tiny models of every family that the libraries support through the server."""
