"""From logits to tokens: penalties and biases, then one vectorised draw over all rows."""
