"""KV caches of batches whose rows keep their own lengths."""
