"""Other implementations of NSA beside ours: one file each says how it is called and what it does otherwise."""
