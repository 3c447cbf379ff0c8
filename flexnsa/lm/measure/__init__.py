"""Measurements: processes, clocks, memory, fits and records."""
