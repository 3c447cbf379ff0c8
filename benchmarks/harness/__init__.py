"""What the benchmarks share: settings, contestants, sessions in which they take turns, a check that they are right."""
