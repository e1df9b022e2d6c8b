import os
import pickle
import subprocess
import sys
import time
from typing import Any

import pytest

from rlhf_core.agents.process import Environments, Event
from rlhf_core.agents.worker import SessionEvent
from rlhf_core.config.agents import EnvironmentAgent, ProgramAgent
from rlhf_core.errors import ConfigError
from rlhf_core.processes.identity import is_running
from rlhf_core.store.fingerprint import hash_file
from rlhf_core.user_code.dependencies import user_code_digest
from rlhf_core.user_code.watch import noted
from tests.rlhf_core.agents.scripted import WORLDS, chat_folder
from tests.rlhf_core.agents.test_episodes import numbered, played
from tests.support.process_state import assert_gone

QUICK = {"step_timeout_s": 0.5, "retries": 0}


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("raise", "the board is broken"),
        ("crash", "its process ended with status 3"),
        ("shape", "step returned a dict; it must return a StepResult"),
        ("nan", "the reward is nan, and must be finite"),
    ],
)
@pytest.mark.parametrize("scheduling", ["lockstep", "continuous"])
def test_a_fault_is_named_and_harms_no_other_episode(fault, named, scheduling):
    results, _ = played("Faulty", ["none", fault, "print"], numbered, scheduling=scheduling, retries=0)
    healthy, faulty, noisy = (result.completion for result in results)
    assert named in faulty.failure and faulty.failure.startswith("the environment failed 1 times: ")
    assert faulty.token_ids and [span.reward for span in faulty.spans] == [0.0]
    assert [one.failure for one in (healthy, noisy)] == ["", ""]
    assert [one.spans[0].reward for one in (healthy, noisy)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("world", "label", "limits", "named"),
    [
        ("Echo", "7", {"max_episode_tokens": 4}, "max_episode_tokens = 4 leaves none to sample"),
        ("Faulty", "surrogate", {}, "half a ?"),  # no file can hold the other half
        ("Faulty", "raise", {"retries": 2}, "the environment failed 3 times"),
        ("Disconnected", "none", {}, "Connect call failed"),
        ("Stuck", "stuck", {"episode_timeout_s": 0.4}, "episode_timeout_s = 0.4"),
        ("Dawdling", "0.3", {"max_turns": 4, "episode_timeout_s": 0.5}, "episode_timeout_s = 0.5 was over"),
        ("Dawdling", "0.5", {"step_timeout_s": 0.2}, "step_timeout_s = 0.2"),  # late, though it never awaits
    ],
)
def test_an_episode_that_cannot_be_played_fails_with_its_reason(world, label, limits, named):
    (episode,), _ = played(world, [label], numbered, **{"retries": 0} | limits)
    assert named in episode.completion.failure and episode.completion.failure.encode()


def test_a_wait_past_the_deadline_ends_that_episode_alone():
    results, sampler = played("Stuck", ["no", "stuck", "no"], numbered, **QUICK)
    assert "step_timeout_s = 0.5" in results[1].completion.failure
    assert [results[i].completion.failure for i in (0, 2)] == ["", ""]
    assert len(sampler.batches) == 1  # nobody was played again


def test_code_that_hangs_without_waiting_is_killed_and_the_others_are_played_again():
    results, _ = played("Faulty", ["none", "hang", "none"], numbered, **QUICK)
    assert "longer than step_timeout_s = 0.5 without waiting" in results[1].completion.failure
    assert [results[i].completion.spans[0].reward for i in (0, 2)] == [1.0, 1.0]


def begun(environments: Environments, label: str) -> int:
    return environments.begin({"label": label}, 7, timeout_s=60.0)


def awaited(environments: Environments, kind: str) -> list[Event]:
    """Return the events until one of `kind` has come."""
    found: list[Event] = []
    end = time.monotonic() + 60.0
    while time.monotonic() < end and kind not in [event.kind for event in found]:
        found += environments.events(timeout_s=0.2)
    return found


def test_replies_that_waited_while_the_caller_was_busy_are_no_silence():
    with Environments(EnvironmentAgent(environment=f"{WORLDS}:Echo"), tokenizer="") as environments:
        ticket = begun(environments, "3")
        (child,) = environments._children
        while environments._inbox.empty():
            time.sleep(0.01)
        child._last_reply -= 3600.0
        assert [(event.ticket, event.kind) for event in environments.events(timeout_s=0.0)] == [(ticket, "observed")]
        assert environments._children == [child] and not child.verdict


def test_an_episode_that_hangs_after_its_end_is_the_fault_of_no_other():
    with Environments(
        EnvironmentAgent(environment=f"{WORLDS}:Lingering", step_timeout_s=0.3), tokenizer=""
    ) as environments:
        over = begun(environments, "hang")
        awaited(environments, "observed")
        environments.end(over)
        other = begun(environments, "3")
        (lost,) = [event for event in awaited(environments, "lost") if event.kind == "lost"]
        assert (lost.ticket, lost.blamed) == (other, False)


def test_a_reply_that_cannot_be_read_is_the_end_of_its_process(monkeypatch):
    with Environments(EnvironmentAgent(environment=f"{WORLDS}:Echo"), tokenizer="") as environments:

        def broken(pipe: Any) -> Any:
            message = read(pipe)
            if isinstance(message, SessionEvent):
                raise ModuleNotFoundError("No module named 'theirs'")
            return message

        read = pickle.load
        monkeypatch.setattr("rlhf_core.processes.host.pickle.load", broken)
        begun(environments, "3")  # the reader waits for this one already, and reads it as ever
        begun(environments, "3")
        lost = [event.value for event in awaited(environments, "lost") if event.kind == "lost"]
        assert all("cannot be read outside its process: ModuleNotFoundError" in reason for reason in lost) and lost


@pytest.mark.parametrize("fault", ["raise", "crash"])
def test_an_episode_is_played_again_from_the_same_seeds(fault, tmp_path):
    arguments = {"once": str(tmp_path / "failed")}
    results, sampler = played("Faulty", [fault], numbered, arguments=arguments, retries=1)
    assert not results[0].completion.failure and results[0].completion.spans[0].reward == 1.0
    assert sampler.batches[0] == sampler.batches[1]


def test_no_process_is_left_even_of_those_that_an_environment_started(tmp_path):
    note = tmp_path / "child"
    played("Spawning", ["none"], numbered, arguments={"note": str(note)})
    assert_gone([int(note.read_text())])


def test_the_process_ends_with_whoever_started_it():
    config = EnvironmentAgent(environment=f"{WORLDS}:Echo")
    environments = Environments(config, tokenizer="")
    pid = environments._children[0]._host.process.pid
    assert os.getpgid(pid) == pid
    environments.close()
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (f"{WORLDS}:Ecko", "did you mean Echo?"),
        ("no/such/file.py:Echo", "there is no file no/such/file.py"),
        ("no_such_module:Echo", "there is no module no_such_module"),
    ],
)
def test_code_that_cannot_be_loaded_is_refused_at_the_start(spec, reason):
    with pytest.raises(ConfigError, match=r"agent\.environment") as refused:
        Environments(EnvironmentAgent(environment=spec), tokenizer="")
    assert reason in str(refused.value)


def test_a_call_to_an_episode_whose_process_is_lost_is_dropped():
    config = EnvironmentAgent(environment=f"{WORLDS}:Faulty")
    with Environments(config, tokenizer="") as environments:
        ticket = begun(environments, "crash")
        awaited(environments, "observed")
        environments.call(ticket, "step", "It is 3.", {}, timeout_s=60.0)
        assert [event.ticket for event in awaited(environments, "lost")] == [ticket]
        environments.call(ticket, "step", "It is 4.", {}, timeout_s=60.0)
        environments.end(ticket)
        assert begun(environments, "none") > ticket and awaited(environments, "observed")


CRASHES = """
import os

from rlhf_core.agents.environment import Environment, StepResult

class World(Environment):
    def step(self, action, *, turn):
        os._exit(3)
"""


def test_an_environment_whose_code_changes_while_it_is_played_is_not_loaded_again(tmp_path):
    file, notes = tmp_path / "world.py", tmp_path / "notes.jsonl"
    (tmp_path / "data.txt").write_text("")
    file.write_text(f"open({str(tmp_path / 'data.txt')!r})\n{CRASHES}")
    spec = f"{file}:World"
    config = EnvironmentAgent(environment=spec)
    code = {spec: user_code_digest(spec)}
    with Environments(config, tokenizer="", functions=code, notes=str(notes)) as environments:
        ticket = begun(environments, "x")
        awaited(environments, "observed")
        file.write_text(CRASHES.replace("3", "4"))
        environments.call(ticket, "step", "a", {"turn": 0}, timeout_s=60.0)
        with pytest.raises(
            ConfigError, match=r"agent = .*world\.py:World': its code, or what it depends on, has changed"
        ):
            awaited(environments, "lost")
    assert noted(notes) == (f"reads {tmp_path / 'data.txt'}",)


def test_a_program_that_changes_while_it_is_played_begins_no_further_episode(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("print(1)")
    config = ProgramAgent(command=("python", str(file)))
    with Environments(config, tokenizer=chat_folder(), files={str(file): hash_file(file)}) as environments:
        begun(environments, "x")
        file.write_text("print(2)")
        with pytest.raises(ConfigError, match=r"agent\.py': its code, or what it depends on, has changed"):
            begun(environments, "y")


PROGRAM = """
import os, sys
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import EnvironmentAgent
environments = Environments(EnvironmentAgent(environment=sys.argv[1]), tokenizer="")
environments.begin({"label": "hang"}, 7, timeout_s=60.0)
while not environments.events(timeout_s=1.0):
    pass
environments.call(0, "step", "a", {}, timeout_s=60.0)
print(environments._children[0]._host.process.pid, flush=True)
os._exit(1)
"""


def test_environments_outlive_nobody_even_while_they_hang():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{WORLDS}:Faulty"], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert_gone([int(ran.stdout)])
