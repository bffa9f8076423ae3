"""gRPC messages between gateways and servers; the modules `*_pb2` are generated."""
