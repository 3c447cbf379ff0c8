"""Attention as a whole and phase by phase: time, memory, mods, packed documents, and how each grows with the length."""
