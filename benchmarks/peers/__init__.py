"""Other implementations of NSA: one file each, with how it is called and in what it differs from flexnsa."""
