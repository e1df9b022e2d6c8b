"""Answers to score, with what a test says of them; the rest does not matter."""

from rlhf_core.types import Completion, FinishReason, Generation, Message, Prompt


def answer(
    text: str,
    *,
    prompt: str = "p",
    asked: str = "hi",
    label: str = "",
    tokens: tuple[int, ...] = (2,),
    finish_reason: FinishReason = "stop",
    conversational: bool = False,
) -> Generation:
    completion = Completion(tokens, (-1.0,) * len(tokens), text, finish_reason, 0, 0)
    return Generation(Prompt(prompt, (Message("user", asked),), label, "test", conversational), (1,), completion)


def answers(*texts: str) -> list[Generation]:
    """Return an answer to each of the prompts p0, p1 and so on."""
    return [answer(text, prompt=f"p{number}") for number, text in enumerate(texts)]
