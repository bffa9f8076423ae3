"""The stages of the gRPC router, one file each, numbered in order of execution."""
