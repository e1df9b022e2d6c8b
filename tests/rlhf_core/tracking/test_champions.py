"""The champions of a real registry, and the way back to the one before."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import RegistryState
from rlhf_core.tracking.champions import (
    champion_digests,
    model_names,
    move_tag,
    read_champions,
    registry_state,
    roll_back,
)
from rlhf_core.tracking.mlflow import MlflowTracker
from rlhf_core.tracking.mlflow_client import TrackingError

Publish = Callable[[str, bool], str]


@pytest.fixture
def uri(database: Path) -> str:
    return f"sqlite:///{database}"


@pytest.fixture
def publish(uri: str, tmp_path) -> Iterator[Publish]:
    """Register the weights of a digest as the stage `publish` does; return the version."""
    tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=tmp_path / "files")
    tracker.start("night", run_id=None, params={}, tags={})
    stage = tracker.stage("publish", key="k1", params={}, tags={})

    def register(digest: str, wins: bool) -> str:
        aliases = ["candidate", "champion"] if wins else ["candidate"]
        tags = move_tag("publish", f"{digest} is better") if wins else {}
        return stage.register("support", digest, aliases=aliases, tags=tags)

    yield register
    tracker.finish("FINISHED", note="")


def test_rollback_goes_to_the_champion_before_and_says_who_and_why(publish, uri):
    assert [publish(digest, True) for digest in ("d1", "d2", "d3")] == ["1", "2", "3"]
    assert publish("d4", False) == "4"
    found = read_champions(uri, "support")
    assert found is not None and (found.current, found.previous) == ("3", "2")
    assert champion_digests(uri, "support")[0] == "d3" and model_names(uri) == ["support"]

    assert roll_back(uri, "support", why="rude answers") == ("3", "2")
    assert champion_digests(uri, "support")[0] == "d2"
    client = MlflowClient(tracking_uri=uri)
    aliases = client.get_registered_model("support").aliases
    assert {name: str(version) for name, version in aliases.items()} == {"candidate": "4", "champion": "2"}
    found = read_champions(uri, "support")
    assert found is not None
    assert [(move.version, move.how, move.why) for move in found.moves] == [
        ("1", "publish", "d1 is better"),
        ("2", "publish", "d2 is better"),
        ("3", "publish", "d3 is better"),
        ("2", "rollback", "rude answers"),
    ]
    assert all(move.by and move.at for move in found.moves)

    assert roll_back(uri, "support", why="still rude") == ("2", "1")  # further back, not to version 3 again
    with pytest.raises(ConfigError, match="champion = 'support': has no champion before the current one"):
        roll_back(uri, "support", why="even ruder")
    assert champion_digests(uri, "support")[0] == "d1"
    assert registry_state(uri, "support") == RegistryState("d1", frozenset({"d2", "d3"}))
    client.set_registered_model_alias("support", "champion", "3")  # a person says so
    assert registry_state(uri, "support") == RegistryState("d3", frozenset({"d2"}))


def test_a_champion_without_a_digest_is_refused(publish, uri):
    publish("d1", True)
    publish("d2", True)
    assert champion_digests(uri, "support") == ("d2", "d1")
    MlflowClient(tracking_uri=uri).delete_model_version_tag("support", "2", "store.digest")
    with pytest.raises(
        ConfigError, match=r"publish.challenge = 'support': its champion, version 2, has no tag store.digest, .*; give"
    ):
        champion_digests(uri, "support")


def test_a_registry_of_its_own_is_read_though_nothing_was_tracked_yet(publish, uri, tmp_path, monkeypatch):
    publish("d1", True)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    assert champion_digests(f"sqlite:///{tmp_path}/new.db", "support") == ("d1", "")


def test_a_version_that_wins_again_comes_after_the_others(publish, uri):
    for digest in ("d1", "d2", "d1"):
        publish(digest, True)
    found = read_champions(uri, "support")
    assert found is not None and (found.current, found.previous) == ("1", "2")


def test_without_a_champion_there_is_nothing_to_go_back_to(publish, uri):
    publish("d1", False)
    assert champion_digests(uri, "support")[0] == "" and model_names(uri) == []
    with pytest.raises(ConfigError, match="has never had a champion"):
        roll_back(uri, "support", why="")
    with pytest.raises(ConfigError, match="the registry has no such model"):
        roll_back(uri, "suport", why="")


def test_a_registry_that_is_not_there_is_empty_or_an_error(tmp_path):
    missing = f"sqlite:///{tmp_path}/none.db"
    assert read_champions(missing, "support") is None and not (tmp_path / "none.db").exists()
    with pytest.raises(TrackingError, match=r"registry at http://127.0.0.1:9: does not answer"):
        read_champions("http://127.0.0.1:9", "support")
