"""The dense baseline: attention over all earlier tokens, its cache and its step."""
