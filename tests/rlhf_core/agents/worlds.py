"""Environments that the tests load by path, as users do: good ones, and those that fail in every way."""

import asyncio
import os
import random
import time
from pathlib import Path

from rlhf_core.agents.environment import Environment, StepResult


class Echo:
    """Wants the label in the answer; says which turn it is until then."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    def reset(self, prompt, seed):
        self._label = prompt["label"]

    def step(self, action, turn):
        right = self._label in action
        return StepResult(
            f"turn {turn}", reward=float(right), done=right or turn + 1 == self._turns, extras={"said": turn}
        )


class Readable:
    """Gives each of two turns the share of its characters that are ASCII letters."""

    def reset(self, prompt, seed):
        return None

    def step(self, action, turn):
        letters = sum(letter.isascii() and letter.isalpha() for letter in action)
        return StepResult("go on", reward=letters / max(len(action), 1), done=turn == 1, extras={"letters": letters})


class Moody:
    """Fails every episode whose seed is odd."""

    def reset(self, prompt, seed):
        self._seed = seed

    def step(self, action):
        if self._seed % 2:
            raise RuntimeError("not today")
        return StepResult(reward=len(action) / 10, done=True)


class Patient(Environment):
    """Waits, as for a server; says what it drew."""

    async def reset(self, prompt, seed):
        await asyncio.sleep(0.01)
        return f"Draw {random.randint(0, 999)}."

    async def step(self, action, **info):
        drawn = random.randint(0, 999)
        await asyncio.sleep(0.05)
        return StepResult(f"{drawn} {random.randint(0, 999)}", reward=0.5, done=info["turn"] == 1)


class Faulty:
    """Does what the label says once it is asked to step; with a file, only while that is not there."""

    def __init__(self, once: str = "") -> None:
        self._once = once

    def reset(self, prompt, seed):
        self._fault = prompt["label"]

    def step(self, action):
        if self._once and Path(self._once).exists():
            return StepResult(reward=1.0, done=True)
        if self._once and self._fault != "none":
            Path(self._once).touch()
        match self._fault:
            case "raise":
                raise ValueError("the board is broken")
            case "surrogate":
                raise ValueError("half a \ud83d")
            case "crash":
                os._exit(3)
            case "hang":
                time.sleep(60)
            case "shape":
                return {"observation": "?"}
            case "nan":
                return StepResult(reward=float("nan"), done=True)
            case "print":
                print("noise on standard output")  # noqa: T201
        return StepResult(reward=1.0, done=True)


class Stuck:
    """Awaits what never comes, where the label says so."""

    async def reset(self, prompt, seed):
        self._stuck = prompt["label"] == "stuck"

    async def step(self, action):
        if self._stuck:
            await asyncio.sleep(60)
        return StepResult(reward=1.0, done=True)


class Dawdling:
    """Works for as many seconds as the label says, and never awaits."""

    def reset(self, prompt, seed):
        self._seconds = float(prompt["label"])

    def step(self, action):
        time.sleep(self._seconds)
        return StepResult("go on")


class Lingering:
    """Hangs when it is closed, where the label says so."""

    def reset(self, prompt, seed):
        self._hang = prompt["label"] == "hang"

    def step(self, action):
        return StepResult(done=True)

    def close(self):
        if self._hang:
            time.sleep(60)


class Disconnected:
    """Speaks to a server that is not there."""

    async def step(self, action):
        await asyncio.open_connection("127.0.0.1", 9)


class Spawning:
    """Starts a child of its own, and writes its number to a file."""

    def __init__(self, note: str) -> None:
        self._note = note

    def step(self, action):
        import subprocess

        child = subprocess.Popen(["sleep", "60"])
        Path(self._note).write_text(str(child.pid))
        return StepResult(done=True)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def shout(text: str) -> str:
    """Write in capitals.

    Args:
        text: what to write
    """
    return text.upper()


def undocumented(a):
    return a
