"""Parses requests and formats answers of routes served over gRPC, one route per file."""
