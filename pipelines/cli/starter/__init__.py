"""The files that `rlhf init` writes into a new folder."""
