"""Time of one decoded token, on a CPU and on a GPU, with NSA and with dense attention."""
