from types import SimpleNamespace
from typing import Any

from pipelines.flows.graph import Stages
from pipelines.services import user_servers as module
from pipelines.services.home import Home
from pipelines.services.user_servers import registry
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.stage.decision import decide, remember, target_of
from rlhf_core.stage.key import StageSpec, Strictness
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import canonical_json
from rlhf_core.types import ArtifactRef, PolicyRef, PublishedRef, ReportRef
from stages.publish import PublishConfig, publish
from tests.support.records import commit, provenance


def publish_spec() -> StageSpec:
    specs: list[StageSpec] = []

    def kept(spec: StageSpec, kind: type[ArtifactRef]) -> Any:
        specs.append(spec)

    policy, report = PolicyRef(uri="store://p", digest="p"), ReportRef(uri="store://r", digest="r")
    Stages(kept, seed=17, runtime=RuntimeConfig()).run(
        publish, "publish", PublishConfig(), policy=policy, report=report
    )
    return specs[0]


def test_a_policy_that_was_published_to_another_registry_is_published_again(tmp_path, monkeypatch):
    store = ArtifactStore(tmp_path / "store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@one.example:5000/?token=abc")
    spec = publish_spec()
    target = target_of(store, spec, strict=Strictness())
    assert "hunter2" not in canonical_json(target.payload) and "abc" not in canonical_json(target.payload)
    out = store.root / "out"
    out.mkdir(parents=True)
    (out / "gate.json").write_text("{}")
    record = provenance(label="publish", stage="publish", payload=target.payload, code=target.code, metrics={})
    commit(store, target.key, out, PublishedRef, children={}, record=record)
    remember(store, spec, target)
    assert decide(store, publish_spec()).action == "HIT"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://you:other@one.example:5000")
    assert decide(store, publish_spec()).action == "HIT", "another user of the same registry"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@two.example:5000")
    decision = decide(store, publish_spec())
    assert decision.action == "RUN"
    assert decision.reason == "engines.registry: http://one.example:5000 -> http://two.example:5000"


def test_a_registry_of_its_own_and_our_server_with_its_database(home, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    alone = registry(home)
    assert alone == "of the state folder"
    uri = "http://127.0.0.1:9"
    ours = SimpleNamespace(tracking_uri=uri, mlflow_url=uri, mlflow_uri="", health={"mlflow": f"{uri}/health"})
    monkeypatch.setattr(module, "running", lambda _: ours)
    monkeypatch.setattr(module, "proven", lambda url, _: url == f"{uri}/health")
    assert module.tracking_uri(home) == uri
    assert registry(home) == alone, "`rlhf up` serves the database that a run without it writes to"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "https://a:b@models.example")
    assert registry(home) == "https://models.example"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "postgresql://a:b/c?d@e@models.example/db?password=x")
    assert registry(home) == "postgresql://models.example/db"


def test_an_empty_address_is_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert module.tracking_uri(Home(tmp_path)) == Home(tmp_path).mlflow_uri
