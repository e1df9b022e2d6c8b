import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from campaigns.faults.__main__ import bad, table
from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.leftovers import watched
from campaigns.faults.scored import groups, left_out, one_error, recovered
from rlhf_core.config.rewards import FunctionReward, OnFailure
from tests.support.forks import soon

FUNCTION = """
def reward(generations):
    if any(one.completion.text == "broken" for one in generations):
        raise ValueError("out of luck")
    return [float(len(one.completion.text)) for one in generations]
"""


def term(folder: Path, on_failure: OnFailure = "invalid") -> FunctionReward:
    (folder / "mine.py").write_text(FUNCTION)
    return FunctionReward(function=f"{folder / 'mine.py'}:reward", batch_size=2, on_failure=on_failure)


def length(text: str) -> float:
    return float(len(text))


def test_a_fault_that_was_noticed_late_is_bad_and_says_so():
    fault = Fault("it hangs", 5.0, lambda folder: Outcome("left out", 1.0, None, ""))
    late, early = Outcome("left out", 6.0, None, "a|b"), Outcome("left out", 4.0, 0.5, "a")
    assert (bad(fault, late), bad(fault, early)) == (True, False)
    assert table([(fault, late)]).splitlines()[2] == "| it hangs | left out (late) | 5 | 6.0 |  | a\\|b |"


def test_a_process_that_left_its_session_and_its_parent_is_found_and_killed():
    orphan = """
import subprocess
nothing = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=nothing, stderr=nothing).pid)
"""
    other = subprocess.Popen(["sleep", "60"])
    with watched() as watch:
        pid = int(subprocess.run([sys.executable, "-c", orphan], capture_output=True, check=True).stdout)
        soon(
            lambda: [one.pid for one in watch.living()] == [pid]
        )  # its environment can be read a little after it began
        psutil.Process(pid).kill()
        assert watch.left() == []
    assert other.poll() is None
    other.kill()
    other.wait()


def test_an_answer_that_fails_alone_is_left_out_with_its_group(tmp_path):
    outcome = left_out(term(tmp_path), tmp_path, groups("broken", "x", "xx", "xxx"), length, named="out of luck")
    assert (outcome.result, outcome.said) == ("left out", "mood: raised ValueError: out of luck")


@pytest.mark.parametrize(("named", "value"), [("another reason", 0), ("out of luck", 1)])
def test_a_reason_or_a_neighbour_that_is_not_right_is_not_handled(named, value, tmp_path):
    def right(text: str) -> float:
        return length(text) + value

    outcome = left_out(term(tmp_path), tmp_path, groups("broken", "x", "xx", "xxx"), right, named=named)
    assert outcome.result == "not handled"


def test_an_error_must_name_what_it_should_and_the_next_batch_be_scored(tmp_path):
    spec, named = term(tmp_path, "fail"), "out of luck"
    assert one_error(spec, tmp_path, groups("broken", "x"), named=named, value=length).result == "one error"
    assert one_error(spec, tmp_path, groups("broken", "x"), named="another reason").result == "not handled"
    assert one_error(spec, tmp_path, groups("broken", "x"), named=named, value=lambda _: 7.0).result == "not handled"
    assert one_error(spec, tmp_path, groups("x", "x"), named=named).result == "not handled"


def test_what_recovers_must_be_scored_right(tmp_path):
    assert recovered(term(tmp_path), tmp_path, groups("x", "xx"), length, "well").result == "recovered"
    assert recovered(term(tmp_path), tmp_path, groups("broken", "xx"), length, "well").result == "not handled"
