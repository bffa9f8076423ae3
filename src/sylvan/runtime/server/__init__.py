"""The HTTP and gRPC server.

`app.create_app` builds the application from the tables in `routes`; `endpoint` does for each call
what all routes share (authentication, budget, body, errors); handlers are in one package per API
(`openai`, `responses`, `anthropic`, `ollama`, `native`, `batches`, `grpc`) and get a
`context.Context`. `observe` has metrics, traces and logs, `stores` what persists between calls.
Answers are generated in `sylvan.runtime.serving`.
"""
