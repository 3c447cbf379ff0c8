"""Errors that more than one part of the library raises."""


class FileError(ValueError):
    """A file or folder cannot be used for what was asked; it is as it was.

    The message says which, what is wrong with it, and what to do.
    """
