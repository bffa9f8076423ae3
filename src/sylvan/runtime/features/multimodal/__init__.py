"""Images, videos and audio in prompts: encoded concurrently with steps, inserted as embeddings.

`control.Multimodal` lets a request wait for its items and says which rows read which embeddings;
`worker.MultimodalWorker` runs the encoder (a `MediaEncoder`: `llava_encoder`,
`transformers_encoder`, `text_encoder`, or one of `published`) and inserts its output. A server may
run only the encoder (`encoder_service`). Items are fetched and decoded in `sylvan.media`.
"""
