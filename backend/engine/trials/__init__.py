"""Looks at a model when it is loaded: what it can do, and what that costs."""
