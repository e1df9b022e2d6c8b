"""A registered policy, loaded by MLflow in a fresh process, although its weights are in the store alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.tracking.mlflow import MlflowTracker
from rlhf_core.tracking.policy_reference import folder_of
from rlhf_core.types import PolicyRef
from tests.support.records import commit, provenance

PROGRAM = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/support@champion")
question = [{"role": "user", "content": "What is 12 + 30?"}]
print(json.dumps([model.predict(question, params={"max_new_tokens": 5}), model.predict(["What is 12 + 30?"], params={"max_new_tokens": 5})]))
"""


def test_a_registered_policy_loads_in_a_fresh_process(store, policy, database, tmp_path):
    from rlhf_core.config.engines import SamplingConfig
    from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig
    from rlhf_core.data.chat import ChatTemplate
    from rlhf_core.runtime.local_runtime import LocalRuntime
    from rlhf_core.types import Message, SamplingRequest

    shutil.copytree(policy, tmp_path / "out")
    ref = commit(store, "a" * 64, tmp_path / "out", PolicyRef, children={}, record=provenance(label="ppo"))
    uri = f"sqlite:///{database}"
    tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=tmp_path / "files", store=store.root)
    tracker.start("tiny", run_id=None, params={}, tags={})
    stage = tracker.stage("ppo", key="k", params={}, tags={})
    stage.model("ppo", ref.digest, ref.uri)
    assert stage.register("support", ref.digest, aliases=["champion"], tags={}) == "1"
    stage.finish("FINISHED")
    tracker.finish("FINISHED", note="")
    assert sum(file.stat().st_size for file in (tmp_path / "files").rglob("*") if file.is_file()) < 2**14  # no weights

    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, uri], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    prompt = ChatTemplate.load(policy).prompt_ids((Message("user", "What is 12 + 30?"),))
    with LocalRuntime(RuntimeConfig(type="local", sampler=HFSamplerConfig())).sampler(policy) as sampler:
        greedy = SamplingConfig(temperature=0.0, max_tokens=5)
        expected = sampler.generate([SamplingRequest(prompt, seed=1)], greedy)[0].text
    assert said == [[expected], [expected]]


@pytest.mark.parametrize("known", ["in another experiment", "as an input"])
def test_a_policy_that_this_run_has_not_made_is_registered_with_its_place(store, database, tmp_path, known):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    ref, uri, files = store.external(PolicyRef, tmp_path / "policy"), f"sqlite:///{database}", tmp_path / "files"
    if known == "in another experiment":
        other = MlflowTracker(uri, experiment="other", artifact_root=tmp_path / "others", store=store.root)
        other.start("tiny", run_id=None, params={}, tags={})
        other.stage("ppo", key="k", params={}, tags={}).model("ppo", ref.digest, ref.uri)
        other.finish("FINISHED", note="")
    tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=files, store=store.root)
    tracker.start("tiny", run_id=None, params={}, tags={})
    stage = tracker.stage("publish", key="p", params={}, tags={})
    if known == "as an input":
        stage.input_model(ref.digest)
    assert stage.register("support", ref.digest, aliases=["champion"], tags={}, uri=ref.uri) == "1"
    stage.finish("FINISHED")
    tracker.finish("FINISHED", note="")
    (model,) = files.rglob("MLmodel")
    assert "loader_module: rlhf_core.tracking.policy_model" in model.read_text()
    assert json.loads((model.parent / "policy.json").read_text()) == {"folder": str(tmp_path / "policy")}


@pytest.mark.parametrize("architecture", ["LlamaForSequenceClassification", "LlamaForCausalLM"])
def test_only_a_causal_language_model_in_the_store_is_a_policy(store, tmp_path, architecture):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    found = folder_of(f"file://{tmp_path / 'model'}", store.root)
    assert (found == tmp_path / "model") == (architecture == "LlamaForCausalLM")
    assert folder_of("store://" + "0" * 64, store.root) is folder_of("store://" + "0" * 64, None) is None
