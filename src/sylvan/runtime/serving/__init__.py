"""The path from a request to its answer, shared by HTTP, gRPC, batches and `sylvan.Engine`.

`service.GenerationService` holds what every call needs. `answers.AnswerRun` answers a conversation
of any chat API, `native.NativeCall` is `/generate`, `embeddings` and `ranking` serve encoder
models; `samples` collects the engine's output for all of them. `sessions` keeps past turns,
`journal` lets another server continue a call. The HTTP routes are in `sylvan.runtime.server`, the
engine behind it in `sylvan.runtime.tokenizer`.
"""
