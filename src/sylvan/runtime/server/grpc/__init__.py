"""The scheduler service over gRPC: token IDs in, token IDs out; needs the extra `grpc`."""
