"""Kinds of evaluation suites: how the answers of a policy become measures with intervals."""
