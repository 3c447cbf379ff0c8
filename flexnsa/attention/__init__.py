"""Attention: the interface in ``seam``, its four implementations, and the choice among them in ``table``."""
