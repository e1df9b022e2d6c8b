"""Tasks of EleutherAI's evaluation harness."""
