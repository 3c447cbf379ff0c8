"""Tile sizes, warps and stages of kernels, by device; no other folder depends on the type of device."""
