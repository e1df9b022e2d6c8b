"""The reward of this profile. A change of it runs `ppo` and `evaluate` again; the other stages are reused."""


def reward(prompts: list[str], completions: list[str], labels: list[str], **columns: list[object]) -> list[float]:
    """Return one number per answer: 1 for an answer that thanks the customer, less 1 per 500 characters."""
    return [float("thank" in answer.lower()) - len(answer) / 500 for answer in completions]
