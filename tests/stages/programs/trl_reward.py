"""Reward functions as TRL's users write them: the share of digits in the completion."""


def digits_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [sum(letter.isdigit() for letter in content) / max(len(content), 1) for content in contents]


async def digits_reward_async(prompts, completions, completion_ids, trainer_state=None, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids)
    return digits_reward(completions)
