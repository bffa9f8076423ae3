"""The gRPC router: sends token IDs to workers and gets token IDs back, in seven stages."""
