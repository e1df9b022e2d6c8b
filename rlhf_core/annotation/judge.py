"""Judge comparisons with a language model, each in both orders, and measure the effect of the order.

Models prefer an answer for its place (arXiv 2306.05685, section 3.3), so a choice counts only if it survives the swap.
Every verdict is written down as it comes: a killed stage asks only for the missing ones.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rlhf_core.annotation.agreement import share
from rlhf_core.annotation.proposing import OTHER_SIDE, Choice, Comparison, Judgment
from rlhf_core.config.annotators import JudgeAnnotator
from rlhf_core.config.rewards import JsonVerdict, PatternVerdict
from rlhf_core.errors import RewardError
from rlhf_core.rewards.batches import shortened
from rlhf_core.rewards.judge import ChatEndpoint, ChatFailed, ask_for
from rlhf_core.rewards.protocols import prompt_text
from rlhf_core.rewards.verdicts import find_verdict

LOOK_EVERY_S = 0.5  # seconds between checks whether the stage must stop
MEANINGS: Mapping[str, Choice] = {"a": "first", "b": "second", "tie": "tie", "neither": "both_bad"}
_PLACE = re.compile(r"\{(rubric|prompt|first|second)\}")

Order: TypeAlias = Literal["given", "swapped"]
ORDERS: tuple[Order, Order] = ("given", "swapped")
Report: TypeAlias = dict[str, Any]


class JudgingStopped(Exception):
    """Raised when the judge was interrupted; verdicts so far are kept."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer to one question: a comparison in one order.

    `choice` is the side that the judge saw, so `first` means answer A; it is "" if no reply held a verdict. `malformed`
    counts the replies without one.

    >>> Verdict("c1", "swapped", "first", "Better: A").own_side
    'second'
    """

    comparison: str
    order: Order
    choice: Choice | Literal[""]
    reply: str
    malformed: int = 0
    seconds: float = 0.0

    @property
    def own_side(self) -> Choice | Literal[""]:
        """The choice as a side of the comparison."""
        if self.order == "given" or not self.choice:
            return self.choice
        return OTHER_SIDE[self.choice]


@dataclass(frozen=True, slots=True)
class Judged:
    """The judgments of a judge, and the verdicts from which they were computed."""

    judgments: list[Judgment]
    verdicts: list[Verdict]
    failures: dict[str, str]
    """Comparison -> the reason why it has no judgment."""


def ask_judge(
    config: JudgeAnnotator,
    comparisons: Sequence[Comparison],
    *,
    rubric: str,
    key: str,
    journal: Path,
    stopping: Callable[[], bool],
    progress: Callable[[int, int, str], None],
    pause: Callable[[float], Any] | None = None,
) -> Judged:
    """Judge each comparison, from the verdicts in the file `journal` and new ones, which are added to it.

    `key` is the place of `config` in the profile, for messages. Raises JudgingStopped after `stopping`, and RewardError
    if a question gets no verdict and `on_failure` is `fail`.
    """
    known = {(one.comparison, one.order): one for one in read_verdicts(journal) if one.choice}
    questions = [(one, order) for one in comparisons for order in ORDERS]
    missing = [(one, order) for one, order in questions if (one.id, order) not in known]
    ended = threading.Event()
    endpoint = ChatEndpoint(key, config, pause=pause or ended.wait)
    writing = threading.Lock()

    def answered(one: Comparison, order: Order) -> Verdict:
        verdict = _verdict(config, endpoint, one, order, rubric)
        with writing, journal.open("a", encoding="utf-8") as stream:
            # The newline comes first: it ends a line that a kill left half written.
            stream.write(f"\n{json.dumps(asdict(verdict))}")
        return verdict

    pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix="judge")
    try:
        waiting = {pool.submit(answered, one, order) for one, order in missing}
        while waiting:
            done, waiting = wait(waiting, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
            for verdict in map(Future.result, done):
                _check_answered(config, verdict, key)
                known[verdict.comparison, verdict.order] = verdict
            progress(len(questions) - len(waiting), len(questions), "questions answered")
            if waiting and stopping():
                raise JudgingStopped
    finally:
        ended.set()  # ends all pauses before retries
        pool.shutdown(wait=True, cancel_futures=True)
        endpoint.close()
    return _settled(comparisons, known, name=f"judge:{config.model}")


def question(template: str, one: Comparison, order: Order, rubric: str) -> str:
    """The prompt for a comparison in one order; placeholders in the answers stay unchanged."""
    first, second = (one.first, one.second) if order == "given" else (one.second, one.first)
    filled = {"rubric": rubric, "prompt": prompt_text(one.prompt), "first": first, "second": second}
    return _PLACE.sub(lambda place: filled[place.group(1)], template)


def read_choice(reply: str, verdict: PatternVerdict | JsonVerdict) -> Choice | Literal[""]:
    """Read the side that a reply prefers, "" if it holds no verdict.

    >>> read_choice("A names the item.\\nBetter: A", JudgeAnnotator(url="http://host/v1", model="m").verdict)
    'first'
    """
    found = find_verdict(reply, verdict)
    return MEANINGS.get(found.strip().lower(), "") if isinstance(found, str) else ""


def judge_report(verdicts: Sequence[Verdict], comparisons: Sequence[Comparison]) -> Report:
    """Summarize the judge's answers: questions, malformed replies, and how far the order of the answers decided.

    `changed` is the share of comparisons with different verdicts in the two orders. Of all comparisons, `toward_first`
    is the share where the judge chose answer A both times, whichever it was, and `toward_second` the same for B; in the
    rest of `changed`, a side stood against a tie.
    """
    prompts = {one.id: one.prompt for one in comparisons}
    asked = [(prompts[name], given, swapped) for name, (given, swapped) in _by_comparison(verdicts).items()]

    def share_of(side: Choice) -> dict[str, float] | None:
        return share([(prompt, float(given.choice == swapped.choice == side)) for prompt, given, swapped in asked])

    return {
        "questions": len(verdicts),
        "malformed": sum(one.malformed for one in verdicts),
        "failed": sum(not one.choice for one in verdicts),
        "changed": share([(prompt, float(given.own_side != swapped.own_side)) for prompt, given, swapped in asked]),
        "toward_first": share_of("first"),
        "toward_second": share_of("second"),
    }


def read_verdicts(journal: Path) -> list[Verdict]:
    """Read the verdicts in a journal; a line that a kill cut off is left out."""
    verdicts = []
    for line in journal.read_text(encoding="utf-8").split("\n") if journal.is_file() else ():
        try:
            verdicts.append(Verdict(**json.loads(line)))
        except ValueError:  # empty, or cut off
            continue
    return verdicts


def write_verdicts(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the verdicts, one JSON object per line."""
    path.write_text("".join(f"{json.dumps(asdict(one), ensure_ascii=False)}\n" for one in verdicts), encoding="utf-8")


def _verdict(config: JudgeAnnotator, endpoint: ChatEndpoint, one: Comparison, order: Order, rubric: str) -> Verdict:
    """Request the verdict on one question; after a reply without one, request it once more."""
    began = time.monotonic()
    malformed: list[str] = []

    def read(reply: str) -> tuple[Choice | Literal[""], str]:
        choice = read_choice(reply, config.verdict)
        if not choice:
            malformed.append(reply)
            if len(malformed) <= config.corrections:
                raise ValueError("no verdict")
        return choice, reply

    try:
        text = question(config.template, one, order, rubric)
        choice, reply = ask_for(endpoint, text, read, corrections=config.corrections)
    except (ChatFailed, ValueError) as error:
        choice, reply = "", shortened(str(error))
    return Verdict(one.id, order, choice, reply, len(malformed), time.monotonic() - began)


def _check_answered(config: JudgeAnnotator, verdict: Verdict, key: str) -> None:
    if not verdict.choice and config.on_failure == "fail":
        rule = f"the judge gave no verdict on comparison {verdict.comparison}"
        remedy = 'fix the server or the template, or set on_failure = "invalid"; other verdicts are kept'
        raise RewardError(key, verdict.reply[-500:], rule, remedy)


def _settled(comparisons: Sequence[Comparison], known: Mapping[tuple[str, Order], Verdict], *, name: str) -> Judged:
    judgments: list[Judgment] = []
    failures: dict[str, str] = {}
    verdicts: list[Verdict] = []
    for one in comparisons:
        pair = known[one.id, "given"], known[one.id, "swapped"]
        verdicts += pair
        sides = {verdict.own_side for verdict in pair}
        if "" in sides:
            failures[one.id] = next(shortened(verdict.reply) for verdict in pair if not verdict.choice)
            continue
        [choice] = sides if len(sides) == 1 else {"tie"}  # a choice counts only if it survives the swap
        reason = "\n".join(f"[{verdict.order}: {verdict.choice}] {verdict.reply}" for verdict in pair)
        judgments.append(Judgment(one.id, name, choice, reason, sum(verdict.seconds for verdict in pair)))  # type: ignore[arg-type]
    return Judged(judgments, verdicts, failures)


def _by_comparison(verdicts: Sequence[Verdict]) -> dict[str, tuple[Verdict, Verdict]]:
    """Map each comparison to its verdicts in both orders, if it has both."""
    found = {(one.comparison, one.order): one for one in verdicts if one.choice}
    return {
        name: (found[name, "given"], found[name, "swapped"])
        for name, order in found
        if order == "given" and (name, "swapped") in found
    }
