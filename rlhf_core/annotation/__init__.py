"""Comparisons of answers, and the people and programs that judge them."""
