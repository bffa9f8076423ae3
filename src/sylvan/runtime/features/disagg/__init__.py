"""Prefill-decode disaggregation: transfers the KV of prompts between servers.

Control halves: `prefill.PrefillRole` sends, `decode.DecodeRole` receives. Their worker halves own a
`sender.Sender` and a `receiver.Receiver`, which speak the protocol in `messages` over a `channel`
and move pages by one of the `mechanisms`.
"""
