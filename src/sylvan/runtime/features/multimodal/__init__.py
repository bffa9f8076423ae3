"""Images, videos and audio in prompts: encoded beside the steps, inserted as embeddings."""
