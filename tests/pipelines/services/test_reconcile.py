import subprocess
import sys
from pathlib import Path

from pipelines.services.home import Home
from pipelines.services.reconcile import reconcile_all, reconcile_mlflow, reconcile_store
from rlhf_core.stage.decision import decide, remember, target_of
from rlhf_core.stage.key import Strictness
from rlhf_core.store import attempts, leases
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.mlflow import EndedRun
from tests.support.toy_stage import stage_key, toy_spec

KILLED = """
import os, sys
from pathlib import Path
from rlhf_core.store import attempts, leases
from rlhf_core.store.artifacts import ArtifactStore
store, key = ArtifactStore(Path(sys.argv[1])), sys.argv[2]
with store.lease(key) as lease:
    attempts.begin(store.attempts(key, lease), label="toy", resumed_from=None, code={})
    os.kill(os.getpid(), 9)
"""


def test_the_lease_and_the_attempt_of_a_killed_process_are_ended_and_a_living_ones_are_left(tmp_path):
    store, spec = ArtifactStore(tmp_path / "store"), toy_spec()
    key = stage_key(spec)
    subprocess.run([sys.executable, "-c", KILLED, str(store.root), key], cwd=Path.cwd(), check=False)
    with store.lease("alive") as lease:
        attempts.begin(store.attempts("alive", lease), label="busy", resumed_from=None, code={})
        said = list(reconcile_store(store))
        held = [table.name for table in store.shared.tables("keys/") if leases.owner_in(table.value)]
        assert held == ["keys/alive"]
        assert attempts.history(store.attempts("alive"))[-1].status == "running"
        assert list(reconcile_store(store)) == []
    assert len(said) == 2
    assert said[0].startswith(f"lease {key[:12]} of process ") and said[0].endswith("removed: its owner is gone")
    assert said[1].startswith(f"attempt 1 at toy ({key[:12]}) -> interrupted: process ")
    assert list(store.layout.attempt(key).glob("out-*")) == []
    remember(store, spec, target_of(store, spec, strict=Strictness()))
    reason = decide(store, spec).reason
    assert reason.startswith("attempt 1 left no checkpoint (process ") and reason.endswith(
        "ended without reporting a result)"
    )


def test_a_state_folder_that_is_not_there_is_not_made(tmp_path):
    home = Home(tmp_path / "home")
    assert list(reconcile_all(home, [ArtifactStore(home.store)])) == []
    assert not home.root.exists()


def test_what_was_ended_in_mlflow_is_named_and_no_database_is_made_to_look(tmp_path, monkeypatch):
    dead = EndedRun("night", "ppo", "12ab", leases.ourselves())
    monkeypatch.setattr("rlhf_core.tracking.mlflow.end_all_dead_runs", lambda uri: [dead])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    home = Home(tmp_path / "home").make()
    assert list(reconcile_mlflow(home)) == []
    (home.root / "mlflow.db").touch()
    assert list(reconcile_mlflow(home)) == [
        f"MLflow night/ppo (12ab) -> KILLED: its {dead.owner} ended without reporting a result"
    ]
