"""What a model with NSA learns, beside a dense one on the same text."""
