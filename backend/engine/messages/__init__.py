"""Commands to the engine and events from it."""
