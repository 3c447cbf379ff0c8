"""Layers with tokens or heads sharded over ranks: ``context_parallel`` and ``tensor_parallel``."""
