"""The scheduler service over gRPC: token ids in, token ids out; needs the extra `grpc`."""
