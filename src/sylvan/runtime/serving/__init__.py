"""One way from a request to its answer: for HTTP, gRPC, batches and `sylvan.Engine`."""
