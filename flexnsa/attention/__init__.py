"""Attention: the contract in ``interface``, its four implementations, and the choice among them in ``dispatch``."""
