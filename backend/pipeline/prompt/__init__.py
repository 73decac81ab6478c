"""From a call to the tokens of its prompt."""
