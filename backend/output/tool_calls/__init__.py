"""One module per wire: the text of a tool call, as a model family writes it, to deltas."""
