"""A decoding step in few kernels: store, compress, attend, score, select, attend, merge."""
