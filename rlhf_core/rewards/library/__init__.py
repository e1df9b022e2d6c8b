"""Rewards to name in a profile: `reward(prompts, completions, labels, **columns)`, strings in, one number or None out each.

None means that a reward does not apply: the label is missing, or nothing could be judged. `columns` are the dataset's
other columns; a reward ignores the ones it does not need. Options are keyword arguments, `arguments = {...}` of the
term.
"""
