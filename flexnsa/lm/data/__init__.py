"""Text as batches of tokens."""
