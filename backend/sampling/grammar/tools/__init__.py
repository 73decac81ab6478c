"""Tools and a call format to grammars for llguidance."""
