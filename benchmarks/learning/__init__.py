"""What models with NSA and dense models learn from the same text."""
