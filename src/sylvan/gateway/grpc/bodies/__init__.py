"""Bodies of routes that are served over gRPC, and the answers to them: one route a file."""
