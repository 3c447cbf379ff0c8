"""Which tiles, warps and stages a device runs a kernel with: the one place that knows devices."""
