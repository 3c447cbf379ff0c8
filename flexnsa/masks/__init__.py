"""Which keys each query sees: positions of tokens, and one kind of mask per file; plain tensors, without scores."""
