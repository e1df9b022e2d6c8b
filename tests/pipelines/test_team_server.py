"""Two people with one store and the server of `rlhf scaffold server`: each has the other's results, under their names."""

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest

from pipelines.flows.profile import load_profile
from rlhf_core.store.artifacts import ArtifactStore, object_digest
from rlhf_core.store.records import KeyRecord
from rlhf_core.store.sharing import share
from tests.support.small_pipeline import write_mini
from tests.support.team_server import Person, TeamServer, team_server

STAGES = ["prepare_data", "sft"]
PROJECT = '[project]\nname = "bot"\nkeep_days = 14\n'


@pytest.fixture
def server() -> Iterator[TeamServer]:
    with team_server() as found:
        yield found


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.timeout(1800)
def test_two_users_of_one_server_and_one_store_have_the_results_of_each_other(
    server: TeamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, ben = server.person("ada", 12001), server.person("ben", 12002)
    server.start()
    let_in(server, [ada, ben], monkeypatch)
    store = ArtifactStore(server.folder / "store")
    store.create()
    share(store.root, server.users.group.gr_name)
    profile = write_mini(server.folder, PROJECT)
    profile.write_text(f'store = "{store.root}"\n{profile.read_text()}')
    run = ["run", str(profile), "--until", "sft"]

    at_prefect, at_mlflow = f"PREFECT_API_URL = {server.prefect}/api: ", f"MLFLOW_TRACKING_URI = {server.mlflow}: "
    distrusted = "has a certificate that is not trusted ("
    wrong = [
        (ada, "PREFECT_API_AUTH_STRING", "ada:guess", f"{at_prefect}refuses this user (401 Unauthorized); set "),
        (ben, "MLFLOW_TRACKING_PASSWORD", "guess", f"{at_mlflow}refuses this user ("),
        (ada, "PREFECT_API_SSL_CERT_FILE", certifi.where(), f"{at_prefect}{distrusted}"),
        (ben, "REQUESTS_CA_BUNDLE", certifi.where(), f"{at_mlflow}{distrusted}"),
    ]
    with ThreadPoolExecutor(2) as two:
        ended = list(two.map(lambda one: one[0].types(*run, **{one[1]: one[2]}), wrong))
    for done, (*_, reason) in zip(ended, wrong, strict=True):
        refused(done, reason)
    assert not any(
        folder.exists() for folder in (store.root / "tables" / "keys", store.layout.objects, store.layout.attempts)
    )

    assert decisions(ada.did(*run)) == dict.fromkeys(STAGES, "RUN")
    assert decisions(ben.did(*run)) == dict.fromkeys(STAGES, "HIT")
    before = records(store)
    flip_a_bit(store.path(before["sft"].handle) / "model.safetensors")
    assert decisions(ben.did(*run)) == {"prepare_data": "HIT", "sft": "RUN"}
    after = records(store)
    assert after["sft"].handle == before["sft"].handle and store.verify() == []
    assert {label: one.user for label, one in after.items()} == {"prepare_data": "ada", "sft": "ben"}
    if server.users.apart:
        assert [store.path(after[label].handle).stat().st_uid for label in STAGES] == [ada.user, ben.user]

    named_in_prefect(server, ada)
    named_in_mlflow(server, load_profile(str(profile)).experiment)
    used = json.loads(ada.did("usage", "--profile", str(profile), "--json"))["usage"]
    assert {one["group"]["user"]: one["results"] for one in used} == {"ada": 1, "ben": 1}
    collected_by_policy(store, str(profile), ada, ben)
    done = json.loads(ada.did("audit", "--profile", str(profile), "--json"))["audit"]
    assert [(one["by"], one["did"]) for one in reversed(done)] == [("ada", "pin"), ("ada", "unpin"), ("ben", "gc")]


def let_in(server: TeamServer, people: list[Person], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the users of MLflow, as its administrator does."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", server.password)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.authority))
    from mlflow.server import get_app_client

    client = get_app_client("basic-auth", server.mlflow)
    for one in people:
        client.create_user(one.name, one.exported["MLFLOW_TRACKING_PASSWORD"])


def refused(done: Any, reason: str) -> None:
    """Check that a run ended before its first stage, with a reason in one line."""
    assert done.returncode == 2 and decisions(done.stdout) == {}, done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith(reason), line
    assert "guess" not in done.stdout + done.stderr


def decisions(said: str) -> dict[str, str]:
    """Return what a run decided about each stage."""
    return dict(re.findall(r"^(\S+): (HIT|RUN|RESUME|ATTACH)\b", said, flags=re.M))


def flip_a_bit(path: Path) -> None:
    """Change the last bit of a file, as a bad disk does."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def records(store: ArtifactStore) -> dict[str, KeyRecord]:
    return {one.label: one for one in store.records()}


def named_in_prefect(server: TeamServer, person: Person) -> None:
    name, _, word = person.exported["PREFECT_API_AUTH_STRING"].partition(":")
    url, verify = f"{server.prefect}/api/flow_runs/filter", server.trust()
    options: dict[str, Any] = {"auth": (name, word), "verify": verify, "trust_env": False, "timeout": 60}
    assert "<html" in httpx.get(f"{server.prefect}/dashboard", follow_redirects=True, **options).text, "it has pages"
    runs = httpx.post(url, json={}, **options).json()
    assert {tag for run in runs for tag in run["tags"]} >= {"user:ada", "user:ben", "project:bot"}
    assert {run["state_name"] for run in runs if "user:ada" in run["tags"]} == {"Completed"}


def named_in_mlflow(server: TeamServer, experiment: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(server.mlflow)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    runs = client.search_runs([found.experiment_id])
    made = {(run.info.run_name.split(" ")[0], run.data.tags["mlflow.user"]) for run in runs}
    assert made == {(label, "ada") for label in ("mini", *STAGES)} | {("mini", "ben"), ("sft", "ben")}


def collected_by_policy(store: ArtifactStore, profile: str, ada: Person, ben: Person) -> None:
    """Check that ben's collection removes what is older than the project says, unless ada holds it."""
    found = records(store)
    held = found["sft"].handle.digest

    def collected(days: int) -> list[str]:
        then = time.time() - days * 86400
        for record in found.values():
            for path in (
                store.root / "tables" / "keys" / f"{record.key}.json",
                store.layout.object(object_digest(record.handle)),
            ):
                os.utime(path, (then, then))
        ben.did("store", "gc", "--profile", profile)
        return sorted(records(store))

    assert collected(13) == STAGES
    ada.did("store", "pin", held, "--note", "for the paper", "--store", str(store.root))
    assert collected(15) == STAGES
    ada.did("store", "unpin", held, "--store", str(store.root))
    assert collected(15) == [] and not any(store.layout.objects.glob("*/*"))
