"""An environment of `verifiers` 0.1: one turn, which earns the share of digits in it, or `scale` times that."""

import verifiers as vf
from datasets import Dataset


def load_environment(scale: float = 1.0):
    def digits(completion, answer, **kwargs) -> float:
        text = completion[-1]["content"] or ""
        if answer == "crash":
            raise RuntimeError("the digits are gone")
        return scale * sum(letter.isdigit() for letter in text) / max(len(text), 1)

    rows = Dataset.from_list([{"question": "What is 3?", "answer": "3"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[digits]))
