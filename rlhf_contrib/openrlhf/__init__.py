"""Translate OpenRLHF command lines (0.6 to 0.11) to a profile: `rlhf import-openrlhf SCRIPT`; run its agent files.

syntax, expansion and shell read the commands of a script, flags reads their flags, the modules of rules write profile
and outcome of each flag to a draft, and translate renders it.
"""
