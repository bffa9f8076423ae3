"""Images, videos and sounds in prompts: encoded beside the steps, put into their rows."""
