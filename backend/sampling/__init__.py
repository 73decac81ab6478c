"""From logits to tokens: penalties and biases, then one vectorised draw for all rows."""
