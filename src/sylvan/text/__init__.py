"""Everything between strings and token ids: shared by runtime, gateway and language; no torch.

Start at `tokenizer.Tokenizer` (text to ids), `chat_template.ChatTemplate` (messages to a prompt),
`detokenizer.IncrementalDetokenizer` (ids to text, stop strings) and `output.OutputReader` (text
to thinking, answer and tool calls). Import from these modules: the package itself exports
nothing.
"""
