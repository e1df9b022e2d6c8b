import subprocess
import sys
import time

from campaigns.durability import processes


def test_what_ran_before_is_no_family_of_a_child_and_is_left_alone(tmp_path):
    """The tests' own Prefect server was killed as a survivor once, and each wait took its full time."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as server:
        ended = processes.run(lambda: None, tmp_path / "log")
        assert (ended.how, ended.survivors) == ("completed", ()) and ended.lingered_s < processes.GONE_WITHIN_S
        assert server.poll() is None
        server.communicate(b"\n")
    assert server.returncode == 0, "its own end is for its starter to hear of"


def test_what_a_child_leaves_behind_is_named_and_killed(tmp_path):
    def leave() -> None:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        subprocess.Popen(command, start_new_session=True)

    processes.adopt_orphans()
    began = time.monotonic()
    try:
        how, _ = processes.finish(processes.start(leave, tmp_path / "log"), kill_after_s=None)
        lingered, survivors = processes.wait_for_family(within_s=0.5)
    finally:
        processes.adopt_orphans(adopt=False)
    assert how == "completed" and 0.5 <= lingered < time.monotonic() - began
    assert len(survivors) == 1 and "time.sleep(600)" in survivors[0]
