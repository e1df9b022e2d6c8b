import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks.processes import family, kill_family, stop_family, wake_family
from campaigns.durability import clocks, command, edits, processes, real, real_runs, report, takeovers
from campaigns.durability.clocks import Skew
from campaigns.durability.lives import Kill, Life
from campaigns.durability.pipeline import REWARD
from campaigns.durability.real_runs import Moment, RealPeace, Run
from pipelines.cli.display import PlainDisplay
from pipelines.cli.main import EXIT_REFUSED
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ArtifactError
from rlhf_core.stage.decision import Action, Decision
from rlhf_core.store import leases

STARTING = """
import subprocess, sys
program = "while True: subprocess.run([sys.executable, '-c', 'print(1, end=str())'])"
subprocess.run([sys.executable, "-c", f"import subprocess, sys{chr(10)}{program}"])
"""


def test_a_family_is_stopped_with_what_it_was_just_starting_and_goes_on_when_it_is_woken(tmp_path):
    said = tmp_path / "said"
    with said.open("w") as output:
        parent = subprocess.Popen([sys.executable, "-c", STARTING], stdout=output)
    try:
        assert wait(lambda: said.stat().st_size >= 3)
        stop_family(parent.pid)
        standing, before = family(parent.pid), said.stat().st_size
        assert all(one.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for one in standing)
        time.sleep(0.3)
        assert family(parent.pid) == standing and said.stat().st_size == before
        wake_family(parent.pid)
        assert wait(lambda: said.stat().st_size >= before + 2)
    finally:
        kill_family(parent.pid)
        parent.wait()


def wait(condition: Callable[[], bool], *, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_command_believes_in_another_machine_and_another_time(tmp_path):
    wall, file, believed = time.time(), tmp_path / "said", Skew(4000.0, 1000.0, elsewhere=True)
    module, argument = command.command(believed)
    assert module == "campaigns.durability.command"

    def run() -> None:
        status = command.main([argument, "runs", "--store", str(tmp_path / "store")])
        file.write_text(json.dumps([status, time.time() - wall, leases.here(), leases.TTL_S, leases.HEARTBEAT_S]))

    assert processes.run(run, tmp_path / "log").how == "completed", (tmp_path / "log").read_text()
    status, ahead, machine, *times = json.loads(file.read_text())
    assert status == 0 and 4000.0 <= ahead < 4300.0 and tuple(machine) == takeovers.ELSEWHERE
    assert times == [command.TTL_S, command.HEARTBEAT_S]


def test_who_believes_in_the_right_time_has_it(tmp_path):
    log = tmp_path / "log"

    def run() -> None:
        clock = time.time
        clocks.apply(Skew(0.0, 0.0, elsewhere=False))
        assert time.time is clock

    assert processes.run(run, log).how == "completed", log.read_text()


def test_the_profile_of_a_state_folder_uses_the_reward_file_there(tmp_path):
    home = real_runs.new_home(tmp_path / "home")
    config = load_profile(home / real_runs.PROFILE)
    assert config.ppo.rewards.terms.keys() == {"reward_model", "brief"}
    assert config.ppo.rewards.terms["brief"].model_dump()["function"] == f"{home / REWARD.name}:brief"
    before = (home / REWARD.name).read_text()
    edits.edit(home / REWARD.name, "result")
    assert (home / REWARD.name).read_text() != before == REWARD.read_text()


def decision(action: Action) -> Decision:
    return Decision(action, "because", "0123456789ab", None)


@pytest.fixture
def said(tmp_path) -> Path:
    """What the display of the command says of a run that is in its second stage."""
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=60))
    display.started("prepare_data", decision("HIT"))
    display.finished("prepare_data", decision("HIT"), {}, 0.0)
    display.started("sft", decision("RUN"))
    display.progress("sft", 1, 3, "loss 1.0")
    display.finished("sft", decision("RUN"), {}, 2.5)
    display.started("iterative_dpo/round_1/dpo", decision("ATTACH"))
    file = tmp_path / "output-0.log"
    file.write_text(output.getvalue())
    return file


def test_what_a_run_did_is_read_from_what_it_says(said):
    found = real_runs.events(said)
    assert [(event["label"], event.get("action")) for event in found] == [
        ("prepare_data", "HIT"),
        ("prepare_data", None),
        ("sft", "RUN"),
        ("sft", None),
        ("iterative_dpo/round_1/dpo", "ATTACH"),
    ]
    assert real_runs.stage(said) == "iterative_dpo/round_1/dpo"
    assert real_runs.seconds(said) == {"sft": 2.5}


def test_what_is_made_again_after_an_edit_is_named(said):
    real_runs.note_edit(said.parent)
    (said.parent / "output-2.log").write_text("prepare_data: RUN: because\nsft: HIT: because\nppo: RESUME: because\n")
    found = real_runs.events(*real_runs.logs(said.parent))
    assert edits.wrong_actions(found, {"ppo"}) == ["ppo: RESUME after the edit", "prepare_data: RUN after the edit"]


def ended(log: Path, status: int) -> Run:
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    process.wait()
    return Run(process, log)


def test_the_sentence_of_a_run_that_was_taken_over_is_told_from_other_ends(tmp_path, said):
    output = io.StringIO()
    taken = f"lease 0123: process 7 on here: {takeovers.SENTENCE}; run again"
    PlainDisplay(Console(file=output, width=60)).failed("sft", ArtifactError(taken))
    said.write_text(f"{output.getvalue()}{taken}\n\n")
    completed = ended(said, 0)
    assert takeovers.wrong_words(["failed", "completed"], ended(said, EXIT_REFUSED).words(), completed.words()) == []
    (wrong,) = takeovers.wrong_words(["failed", "completed"], ended(said, 1).words(), "")
    assert wrong.startswith("the woken run failed: Error: ")
    assert takeovers.wrong_words(["completed", "failed"], "", ended(said, EXIT_REFUSED).words()) != []


def test_a_run_works_once_it_computes_a_stage_itself(said):
    assert ended(said, 0).works()
    said.write_text("sft: HIT: because\nppo: ATTACH: because\n")
    assert not ended(said, 0).works()


def test_a_moment_comes_once_its_stage_has_begun_or_not_if_the_run_ends_before(said):
    long = Run(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]), said)
    assert real_runs.reach(long, Moment("sft", 0.05))
    long.process.kill()
    assert real_runs.finish(long) == "failed"
    short = replace(long, process=subprocess.Popen([sys.executable, "-c", "pass"]))
    assert not real_runs.reach(short, Moment("publish", 60.0))
    assert real_runs.finish(short) == "completed"


KILLED = """
import json, subprocess, sys
from pathlib import Path
from campaigns.durability import processes, real_runs
from campaigns.durability.lives import Life
from campaigns.durability.real_runs import Moment, Run

processes.adopt_orphans()
life = Life("a life", mlflow=True)
for alone, seconds, label in ((False, 60, "sft"), (True, 60, "sft"), (False, 0, "publish")):
    program = f"import time; time.sleep({seconds})"
    run = Run(subprocess.Popen([sys.executable, "-c", program]), Path(sys.argv[1]))
    life.ends.append(real_runs.killed(life, run, Moment(label, 0.05), alone=alone))
print(json.dumps([life.ends, [(kill.kind, kill.stage) for kill in life.kills]]))
"""


def test_a_run_that_lives_at_its_moment_is_killed_and_noted(said):
    # In a process of its own: all its children are waited for.
    done = subprocess.run([sys.executable, "-c", KILLED, str(said)], capture_output=True, text=True, check=True)
    ends, kills = json.loads(done.stdout.splitlines()[-1])
    assert ends == ["killed", "killed", "completed"]
    at = "iterative_dpo/round_1/dpo"
    assert kills == [["the whole family at once", at], ["the process of the command alone", at]]


def test_moments_are_in_the_part_of_a_run_that_is_asked_for(tmp_path):
    peace = RealPeace(tmp_path, 1, 100.0, {"sft": 10.0, "ppo": 20.0, "publish": 0.5}, {})
    drawn = [peace.moment(peace.draws("test", number), reach=0.6) for number in range(200)]
    assert {moment.label for moment in drawn} == {"", "sft", "ppo"}
    assert max(moment.after_s for moment in drawn if not moment.label) <= 60.0
    assert max(moment.after_s for moment in drawn if moment.label == "sft") <= 10.0


def test_what_was_done_to_real_runs_apart_from_kills_is_reported():
    stopped, edited = (
        Kill(takeovers.KIND, "ppo", "", 0.0),
        Kill("reward file edited after a kill: result", "sft", "", 0.0),
    )
    lives = [
        Life("a", mlflow=True, others=[stopped], ends=["the woken run completed"]),
        Life("b", mlflow=True, others=[edited], kills=[Kill("the whole family at once", "sft", "", 1.0)]),
    ]
    text = report.markdown(report.Campaign("command", [], lives, [], stages=19, peace_s=1.0, seconds=2.0))
    for row in (
        f"| {takeovers.KIND} | 1 |",
        f"| {edited.kind} | 1 |",
        "| the woken run completed | 1 |",
        "| ppo | 1 |",
    ):
        assert row in text
    assert [real.hits(life) for life in lives] == [1, 1]
