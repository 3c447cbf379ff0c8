"""Operators that ``torch.compile`` does not trace into, and launches that are recorded and replayed."""
