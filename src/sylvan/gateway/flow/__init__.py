"""Flow control: admission and retries."""
