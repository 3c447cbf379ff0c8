"""Every figure of the project, drawn from recorded measurements or from the code itself: ``python -m plots``."""
