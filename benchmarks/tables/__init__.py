"""The tables of pages, written from what is recorded in ``benchmarks/results``."""
