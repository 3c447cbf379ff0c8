"""Points for pytest-benchmark, whose runs can be compared with each other."""
