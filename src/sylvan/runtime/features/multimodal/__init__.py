"""Images, videos and audio in prompts: encoded concurrently with steps, inserted as embeddings."""
