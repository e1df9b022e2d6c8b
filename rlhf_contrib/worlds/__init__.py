"""Synthetic worlds whose true reward is a program, so that every stage can be judged exactly."""
