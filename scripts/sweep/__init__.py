"""Every family of models that the libraries know, tiny, through the server."""
