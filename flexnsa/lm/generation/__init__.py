"""Generation: prompts, sampling, steps and stops."""
