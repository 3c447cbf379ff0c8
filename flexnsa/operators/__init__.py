"""Operators that ``torch.compile`` does not trace into: results, gradients, launches, and what checkpointing keeps."""
