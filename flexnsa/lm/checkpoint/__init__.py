"""The files of a run: their formats, their checksums, the lock and the log."""
