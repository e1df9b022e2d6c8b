"""Monitors of a training run: pure functions of the history of its metrics, and their actions."""
