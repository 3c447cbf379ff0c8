"""Errors that more than one part of the library raises."""


class FileError(ValueError):
    """A file or folder cannot be used as asked; nothing was changed.

    The message names the file, what is wrong with it, and what to do.
    """


class RanksDifferError(ValueError):
    """The ranks of a training run were given different values; the message names the first, with each rank's value."""


class FileWarning(UserWarning):
    """A file was used although something about it is unusual; the message names the file and says what."""
