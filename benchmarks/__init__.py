"""Memory and time of flexnsa beside other attentions: ``python -m benchmarks`` lists every benchmark, and runs one."""
