"""One model on several processes: the same session on every rank, and rank 0 decides."""
