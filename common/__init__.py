"""Process manners that any gRPC model backend could reuse; knows nothing of `backend`."""
