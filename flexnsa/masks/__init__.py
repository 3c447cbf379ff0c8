"""Which key reaches which query, one idea a file. Everything here takes plain tensors and knows nothing of scores."""
