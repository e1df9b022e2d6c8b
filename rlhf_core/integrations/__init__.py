"""Agents and annotation tools of other programs, each a module that is found by its name in a profile.

An agent's module defines `open_agent(config, tokenizer=, code=, notes=)` and `SESSION`, the kind of session that plays what
it returns. A module of an annotation tool (the `format` of a source) defines `responses(row)`, the fields of a record and
the responses to it. Nothing imports these modules: who uses none of those programs need not read them.
"""
