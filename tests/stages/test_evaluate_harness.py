"""Tasks of EleutherAI's harness: our engines get the numbers that the harness gets of the same folder alone."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from stages.config import evaluate_harness
from stages.config.evaluate_harness import HarnessSuite, content_digests
from tests.support.workshop import Workshop

pytest.importorskip("lm_eval")

CHOICE = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/sums.jsonl"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "What is {{{{a}}}} + {{{{b}}}}?"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""
WRITE = """
task: writes
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/sums.jsonl"}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{{{a}}}} + {{{{b}}}}?"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["t"], max_gen_toks: 12}}
metric_list:
  - {{metric: length, aggregation: mean, higher_is_better: false}}
process_results: !function measures.length
"""
MEASURES = """
def length(doc, results):
    return {"length": float(len(results[0]))}
"""
ROLLING = """
task: perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/sums.jsonl"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "What is {{{{a}}}} + {{{{b}}}}? It is {{{{text}}}}."
metric_list:
  - {{metric: word_perplexity}}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"a": a, "b": b, "text": str(a + b), "choices": [f" {a + b}", f" {a + b + 1}", " It is"], "answer": (a + b) % 3}
        for a, b in [(1, 2), (12, 30), (4, 4), (10, 2), (7, 1), (3, 30), (2, 2), (12, 12)]
    ]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in {"sums": CHOICE, "writes": WRITE, "perplexity": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    (folder / "measures.py").write_text(MEASURES)
    return folder


def harness_alone(policy: Path, tasks: Path) -> Any:
    """Return what the harness finds with its own `hf` model in float32, without any of our code."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(policy), "dtype": "float32"},
        batch_size=4,
        device="cpu",
        tasks=["sums", "writes", "perplexity"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )


@pytest.mark.slow
def test_the_suite_gets_the_numbers_of_the_harness_alone(store: ArtifactStore, policy: Path, tasks: Path) -> None:
    config = HarnessSuite(name="sums", tasks=("sums", "writes", "perplexity"), include_path=str(tasks))
    shop = Workshop(store)
    inputs = {"policy": store.external(PolicyRef, policy)}
    ref, decision = shop.run("evaluate_harness", config, inputs, files=content_digests(config))
    found = harness_alone(policy, tasks)
    alone = found["results"]
    ours = json.loads((store.path(ref) / "lm_eval.json").read_text())["results"]
    for task, names in {"sums": ("acc", "acc_norm"), "writes": ("length",), "perplexity": ("word_perplexity",)}.items():
        for name in names:
            assert ours[task][f"{name},none"] == pytest.approx(alone[task][f"{name},none"], rel=1e-5), (task, name)
    rows = [json.loads(line) for line in (store.path(ref) / "rows.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows if row["slice"] == "writes"] == [
        one["filtered_resps"][0] for one in found["samples"]["writes"]
    ]
    report = json.loads((store.path(ref) / "report.json").read_text())
    assert report["headline"] == "sums/acc" and report["lower_is_better"] == [
        "writes/length",
        "perplexity/word_perplexity",
    ]
    accuracy = report["measures"]["sums/acc"]
    assert accuracy["low"] <= accuracy["mean"] <= accuracy["high"] and accuracy["prompts"] == 8
    assert set(report["slices"]["sums"]) == {"sums/acc", "sums/acc_norm"}
    assert shop.metrics(decision)["sums/acc"] == alone["sums"]["acc,none"]
    assert shop.runtime.engines().keys() >= {"torch", "transformers"}


@pytest.mark.slow
def test_an_unknown_task_is_refused_by_name(store: ArtifactStore, policy: Path, tasks: Path) -> None:
    config = HarnessSuite(name="sums", tasks=("summs",), include_path=str(tasks))
    with pytest.raises(ConfigError, match=r"evaluate\.suites\.tasks = 'summs': there is no such task"):
        Workshop(store).run("evaluate_harness", config, {"policy": store.external(PolicyRef, policy)})


def test_tasks_that_change_get_another_key_and_are_refused_meanwhile(
    store: ArtifactStore, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.yaml").write_text("task: one")
    config = HarnessSuite(name="sums", tasks=("one",), include_path=str(tmp_path / "tasks"))
    before = content_digests(config)
    (tmp_path / "tasks" / "one.yaml").write_text("task: two")
    assert content_digests(config) != before
    with pytest.raises(ConfigError, match="has changed since the run was planned"):
        Workshop(store).run("evaluate_harness", config, {"policy": store.external(PolicyRef, policy)}, files=before)


def test_without_the_package_the_plan_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(evaluate_harness, "version", missing)
    rule = r"evaluate\.suites\.sums\.type = 'lm_eval': needs the package lm_eval, which is not installed; install the extra"
    with pytest.raises(ConfigError, match=rule):
        content_digests(HarnessSuite(name="sums", tasks=("sums",)))
