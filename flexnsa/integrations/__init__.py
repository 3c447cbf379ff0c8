"""flexnsa inside other libraries; each is imported by name, because each needs one that flexnsa does not."""
