"""Kinds of evaluation suites: they turn the answers of a policy into measures with intervals."""
