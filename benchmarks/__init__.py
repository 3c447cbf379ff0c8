"""Memory and time of flexnsa and of other attentions: ``python -m benchmarks`` lists every benchmark, and runs one."""
