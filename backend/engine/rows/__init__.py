"""Requests in the engine: who runs, who waits, what each may take."""
