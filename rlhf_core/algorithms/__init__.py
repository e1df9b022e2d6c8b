"""Losses and estimators: pure functions on tensors, and the options of the ones that profiles choose by `type`.

A loss is a partial sum over one micro-batch of a mean over the whole optimizer step.
"""
