"""`rlhf rehearse` runs the whole graph of a profile with tiny models, a few rows and a few steps, and lists problems."""
