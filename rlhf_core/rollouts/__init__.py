"""Rollouts for policy optimization: sample them, score them, and keep them until they are trained on."""
