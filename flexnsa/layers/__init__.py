"""The attention layer and its parts: compression, gates, rotary embedding, and what joins them."""
