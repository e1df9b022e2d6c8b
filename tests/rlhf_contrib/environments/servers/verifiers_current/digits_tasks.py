"""A taskset of `verifiers` since 0.2: one turn, which earns the share of digits in it."""

import verifiers.v1 as vf


class Digits(vf.Task):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        text = trace.last_reply or ""
        return sum(letter.isdigit() for letter in text) / max(len(text), 1)


class DigitTasks(vf.Taskset[Digits]):
    def load(self):
        yield Digits(vf.TaskData(prompt="What is 3?"), self.config.task)


__all__ = ["DigitTasks"]
