"""The path from a request to its answer, shared by HTTP, gRPC, batches and `sylvan.Engine`."""
