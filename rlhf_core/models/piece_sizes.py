"""Largest pieces in which models compute and ranks exchange; without torch, for predictions of memory."""

LOGPROB_ELEMENTS = 2**25
"""Maximum number of logits in memory at once for log-probabilities, which take few such matrices (`rlhf_core.models.forward`)."""
BUCKET = 200_000_000
"""Elements of DeepSpeed's reduce bucket (`reduce_bucket_size`), or twice the trained parameters if they are fewer.

A rank keeps one for each trained model. DeepSpeed's default is 5e8, 1 GB in bfloat16.
"""
