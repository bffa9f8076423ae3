"""Routes requests to many runtimes by cached prefix and load, and survives worker failures.

Built by `build.GatewayRuntime`. A call enters `app.Gateway`, which matches its route (`table`)
and authenticates the caller (`security`). `http.router.HttpRouter` admits the request (`flow`),
has `placement.RequestPlacer` choose a worker (`workers.registry` lists candidates, `policies`
choose), and relays its answer (`http.exchange`). `grpc` does the same for workers that speak
gRPC, `openai` for servers of the OpenAI API, and `control` answers the gateway's own routes.
"""
