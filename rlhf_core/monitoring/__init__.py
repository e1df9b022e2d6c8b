"""Monitors of a training run: pure functions of the history of its metrics, and what is done when one finds a fault."""
