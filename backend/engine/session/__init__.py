"""A loaded model at work: one turn after another."""
