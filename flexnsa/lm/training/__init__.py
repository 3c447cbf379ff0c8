"""Training on text: schedule, steps, checkpoints, exact resumption."""
