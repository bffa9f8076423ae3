"""Fetches, decodes and prepares images, videos and audio of clients; imports no torch.

Start at `source.MediaSource`, which bodies become; `fetch.Fetcher` gets its bytes, and
`pool.MediaWorkers` prepares it in a separate process, where `worker` runs the checkpoint's
processor (`processor`) or a faster equivalent (`fixed_size`, `published`, `dual_encoder`,
`videos`). Encoders are in `sylvan.runtime.features.multimodal`.
"""
