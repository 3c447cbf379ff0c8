"""Decoding caches: the keys and values of past tokens, and the positions and slots of new ones."""
