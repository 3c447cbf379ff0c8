"""One decoded token, on a CPU and on a GPU, beside dense attention."""
