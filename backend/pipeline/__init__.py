"""From a call to its result: generation, embedding, scoring, reranking, and their parts."""
