"""Several processes, on a GPU each: that they compute what one does, and how fast."""
