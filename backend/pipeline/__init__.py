"""Turns calls into results: generation, embedding, scoring, reranking, and their parts."""
