"""What plain attention can compute of a branch, by the kernels that torch brings along."""
