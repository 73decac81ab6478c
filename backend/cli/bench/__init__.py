"""The command `bench`: the speed of a running backend, seen from a client."""
