"""Request and response bodies of the public APIs, and their conversion to protocol types.

One module per API: `openai`, `anthropic`, `ollama`, and `native` for the routes of SGLang. Bodies
are types derived from `validation.WireModel`, which names the first invalid field;
`request_fields` has the fields that several APIs share. `answering` plans how tools, thinking and
grammars constrain an answer. Handlers of the routes are in `sylvan.runtime.server`.
"""
