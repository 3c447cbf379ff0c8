"""Which keys each query sees, one kind of mask per file; functions of plain tensors, without scores."""
