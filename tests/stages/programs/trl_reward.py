"""Reward functions as TRL's users write them for prompts that are text: the share of digits in the completion."""


def digits_reward(completions, **kwargs):
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


async def digits_reward_async(prompts, completions, completion_ids, trainer_state=None, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids)
    return digits_reward(completions)
