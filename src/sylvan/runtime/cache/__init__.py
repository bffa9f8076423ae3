"""Who owns which page of KV memory; numpy only."""
