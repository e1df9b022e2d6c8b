"""Predict the memory and time of each stage of a plan: `rlhf plan --estimate`. Arithmetic without torch."""
