"""Run a profile with several values of its keys and compare the results: `rlhf sweep`."""
