"""Measurements of models of Hugging Face transformers with flexnsa in them."""
