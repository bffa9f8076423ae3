"""Everything between strings and token ids: shared by runtime, gateway and language; no torch.

Import from the modules: `tokenizer`, `detokenizer`, `chat_template`, `reasoning`, `tools`.
"""
