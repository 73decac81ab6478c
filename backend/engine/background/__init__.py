"""Work computed between steps: embeddings, scores, encoders."""
