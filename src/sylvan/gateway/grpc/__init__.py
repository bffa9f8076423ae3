"""The gRPC router: requests to workers that take and give token ids, in seven stages."""
