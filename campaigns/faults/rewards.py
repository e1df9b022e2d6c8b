"""Cause faults of reward functions, each in a separate process as in a run; a missing score must never become 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.leftovers import end_with_the_run
from campaigns.faults.scored import GROUP, groups, left_out, one_error, recovered
from rlhf_core.config.rewards import FunctionReward, OnFailure

TIMEOUT_S = 5.0
START_S = 20.0
"""Seconds for starting a process on a busy machine; the cost of a fault is added."""

REWARD = """
import os, re, subprocess, sys, time
from pathlib import Path

def by_mood(generations):
    mood = generations[0].completion.text
    scores = [float(len(g.completion.text)) for g in generations]
    if mood == "raises":
        raise KeyError("no such thing")
    if mood == "raises once" and not Path(__file__).with_suffix(".once").exists():
        Path(__file__).with_suffix(".once").touch()
        raise ConnectionError("not now")
    if mood == "is slow within its deadline":
        time.sleep(2)
    if mood == "hangs":
        re.match(r"(a+)+$", "a" * 40 + "b")   # for hours, and holds the interpreter lock
    if mood == "dies":
        os._exit(3)
    if mood == "kills itself with its children":
        os.fork()
        os.kill(os.getpid(), 9)
    if mood == "leaves a child in a session of its own":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if mood == "dies with a child in a session of its own":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        os._exit(3)
    if mood == "prints garbage":
        os.write(1, b"\\x80\\x04garbage" * 10_000)
        print("x" * 100_000)
    wrong = {"returns NaN": [float("nan")], "returns infinity": [float("-inf")], "returns 1e38": [1e38],
             "returns text": ["good"], "returns None": [None], "returns too few": [], "returns too many": [0.0, 0.0]}
    return wrong[mood] + scores[1:] if mood in wrong else scores
"""

RUN = """
import sys
from campaigns.faults.scored import groups, opened
from rlhf_core.config.rewards import FunctionReward
from pathlib import Path
with opened(FunctionReward(function=sys.argv[1], timeout_s=600), Path(sys.argv[2])) as scorer:
    print("up", flush=True)
    scorer(groups("hangs"))
"""

MUST_BE_FINITE = "must be finite"
ERRORS = {
    "raises": "KeyError",
    "hangs": "took longer than 5 s",
    "dies": "ended with status 3",
    "kills itself with its children": "ended with status -9",
    "dies with a child in a session of its own": "ended with status 3",
    "returns NaN": MUST_BE_FINITE,
    "returns infinity": MUST_BE_FINITE,
    "returns 1e38": MUST_BE_FINITE,
    "returns text": "a reward must be a number or None, not 'good'",
    "returns too few": "for 2 generations",
    "returns too many": "for 2 generations",
}
"""Behavior of the function -> text that the error must contain."""


def _spec(folder: Path, *, on_failure: OnFailure = "fail", retries: int = 0) -> FunctionReward:
    file = folder / "by_mood.py"
    file.write_text(REWARD, encoding="utf-8")
    return FunctionReward(
        function=f"{file}:by_mood", timeout_s=TIMEOUT_S, batch_size=GROUP, retries=retries, on_failure=on_failure
    )


def _length(text: str) -> float:
    return float(len(text))


def _one_error(mood: str, folder: Path) -> Outcome:
    return one_error(_spec(folder), folder, groups(mood, "x", "xx", "xxx"), named=ERRORS[mood], value=_length)


def _left_out(mood: str, folder: Path) -> Outcome:
    lost = GROUP if mood in ("returns too few", "returns too many") else 1  # unknown whose score is missing
    spec = _spec(folder, on_failure="invalid")
    return left_out(spec, folder, groups(mood, "x", "xx", "xxx"), _length, named=ERRORS[mood], lost=lost)


def _does_not_apply(folder: Path) -> Outcome:
    """A score of None means that the term does not apply; it is neither a failure nor 0."""
    spec = _spec(folder, on_failure="invalid")
    answers = groups("returns None", "x", "xx", "xxx")
    return left_out(spec, folder, answers, _length, named="no reward applies", counted=False)


def _recovered(mood: str, said: str, folder: Path) -> Outcome:
    spec = _spec(folder, retries=1 if mood == "raises once" else 0)
    return recovered(spec, folder, groups(mood, "x", "xx", "xxx"), _length, said)


def _run_is_killed(folder: Path) -> Outcome:
    return end_with_the_run(RUN, _spec(folder).function, str(folder))


RECOVERED = {
    "raises once": "tried again after 0.5 s (retries = 1), then scored right",
    "is slow within its deadline": "waited for, and scored right",
    "prints garbage": "scored right; what it printed went to standard error",
    "leaves a child in a session of its own": "scored right; the child ended with the process of the function",
}

FAULTS: list[Fault] = [
    *(Fault(f"reward function {mood}", TIMEOUT_S + START_S, partial(_one_error, mood)) for mood in ERRORS),
    *(
        Fault(f'reward function {mood}, on_failure = "invalid"', 2 * TIMEOUT_S + START_S, partial(_left_out, mood))
        for mood in ERRORS
    ),
    Fault("reward function returns None", START_S, _does_not_apply),
    *(Fault(f"reward function {mood}", START_S, partial(_recovered, mood, said)) for mood, said in RECOVERED.items()),
    Fault("run killed while a reward function hangs", START_S, _run_is_killed),
]
