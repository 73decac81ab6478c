"""Everything that knows gRPC or protobuf: the edge between the host and the pipeline."""
