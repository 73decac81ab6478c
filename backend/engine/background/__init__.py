"""Work computed between steps: embeddings and scores."""
