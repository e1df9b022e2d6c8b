"""Rewards to name in a profile: `reward(prompts, completions, labels, **columns)`, strings in, one number or None out each.

None says that a reward does not apply: there is no label, or nothing could be judged. `columns` are the dataset's other
columns; a reward ignores the ones it does not need. Options are keyword arguments, `arguments = {...}` of the term.
"""
