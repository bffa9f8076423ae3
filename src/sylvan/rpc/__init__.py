"""gRPC messages between gateways and servers; the modules `*_pb2` are generated.

`scheduler_pb2` is SGLang's scheduler service, `common_pb2` the messages that it shares with others.
The methods are implemented in `sylvan.runtime.server.grpc` and called in `sylvan.gateway.grpc`.
"""
