"""Losses as pure functions on tensors, each a partial sum over one micro-batch of a global mean."""
