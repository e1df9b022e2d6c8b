"""Agents and environments of other projects, each a module that is found by the `type` of an agent's configuration.

A module defines `open_agent(config, tokenizer=, code=, notes=)` and `SESSION`, the kind of session that plays what it returns.
Nothing imports these modules: who uses none of those projects need not read them.
"""
