"""Memory and time of flexnsa beside other attentions; each script runs as ``python -m benchmarks.<name>``."""
