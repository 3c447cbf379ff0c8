"""What the command line, the benchmarks and the plots measure with: processes, clocks, memory, fits, records."""
