"""Synthetic worlds whose true reward is computed by a program, so that every stage can be judged exactly."""
