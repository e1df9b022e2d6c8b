"""Serve a policy or a reward over HTTP."""
