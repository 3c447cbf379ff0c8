"""Processes and their memory, and what commands report."""
