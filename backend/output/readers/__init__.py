"""Read tool calls: the text of a call, as a model family writes it, to deltas."""
