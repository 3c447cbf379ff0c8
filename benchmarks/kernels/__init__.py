"""The parts alone: block selection, the selected branch, and the bytes of block masks."""
