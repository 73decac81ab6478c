"""The dashboard: the state of the backend in a browser."""
