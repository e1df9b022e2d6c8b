"""Run programs that a model wrote, and reward them by their tests."""
