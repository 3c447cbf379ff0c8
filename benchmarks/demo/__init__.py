"""Train NSA and dense models on real text, and measure them: everything in one picture."""
