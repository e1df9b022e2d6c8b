"""Wordings of questions in the arithmetic worlds, and the fraction that is held out for evaluation."""

SOURCE = "arithmetic"
WORDINGS = ("What is {}?", "Compute {}.", "How much is {}?", "Please solve {}.")
HELD_OUT = 6
"""One in this many questions (a problem in one wording) is held out; its problem may occur in other wordings."""
