"""A decoding step in few kernels: place, compress, attend, score, select, attend, merge."""
