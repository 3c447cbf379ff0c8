"""What benchmarks share: settings, workloads, sessions in which workloads run in turn, checks, options."""
