"""The page for people: the state of the backend in a browser."""
