"""The stages of the gRPC router, one file each, in the order of their numbers."""
