"""Translate OpenRLHF command lines (0.6 to 0.11) to a profile: `rlhf import-openrlhf SCRIPT`; run its agent files.

scanner, syntax, conditions, expansion, shell -> the commands of a script, arguments -> their flags, rules -> the profile
and the outcome of each flag, toml -> text.
"""
