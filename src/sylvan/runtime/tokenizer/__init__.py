"""Requests in, text out: tokenisation, routing to schedulers, detokenisation.

`manager.TokenizerManager` is the entry point of the API process: it checks, tokenises and admits
requests. `router.ReplicaRouter` chooses a replica, `scheduler_client.SchedulerClient` submits to
its scheduler and replays after a crash, `live` holds the state of live requests,
`detokenizer.DetokenizerManager` turns tokens into text. `adapters`, `weight_updates` and `fan_out`
send commands to all replicas. Tokenizers themselves are in `sylvan.text`.
"""
