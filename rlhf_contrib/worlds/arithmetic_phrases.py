"""How questions of the arithmetic worlds are asked, and how many of them are kept for evaluation."""

SOURCE = "arithmetic"
WORDINGS = ("What is {}?", "Compute {}.", "How much is {}?", "Please solve {}.")
HELD_OUT = 6
"""One question (a problem in one wording) in so many is for evaluation only; its problem may occur in other words."""
