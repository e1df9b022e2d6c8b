"""Agents of other programs, each a module that is found by its name in a profile.

An agent's module defines `open_agent(config, tokenizer=, code=, notes=)` and `SESSION`, the kind of session that plays what
it returns. Nothing imports these modules: who uses none of those programs need not read them.
"""
