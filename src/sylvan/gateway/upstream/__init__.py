"""HTTP and gRPC clients for workers."""
