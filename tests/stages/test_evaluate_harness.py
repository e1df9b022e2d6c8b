"""Tasks of EleutherAI's harness: our engines get the numbers that the harness gets of the same folder alone."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import Completion, PolicyRef
from stages import evaluate_harness
from stages.evaluate_harness import HarnessSuite, content_digests
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
GROUP = """
group: both
task: [sums, perplexity]
aggregate_metric_list: [{metric: acc}]
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
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"a": a, "b": b, "text": str(a + b), "choices": [f" {a + b}", f" {a + b + 1}", " It is"], "answer": (a + b) % 3}
        for a, b in [(1, 2), (12, 30), (4, 4), (10, 2), (7, 1), (3, 30), (2, 2), (12, 12)]
    ]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in {"sums": CHOICE, "writes": WRITE, "perplexity": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    (folder / "both.yaml").write_text(GROUP)
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
def test_the_suite_gets_the_numbers_of_the_harness_alone(store, policy, tasks):
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
def test_an_unknown_task_is_refused_by_name(store, policy, tasks):
    config = HarnessSuite(name="sums", tasks=("summs",), include_path=str(tasks))
    with pytest.raises(ConfigError, match=r"evaluate\.suites\.tasks = 'summs': there is no such task"):
        Workshop(store).run("evaluate_harness", config, {"policy": store.external(PolicyRef, policy)})


def test_tasks_that_change_get_another_key_and_are_refused_meanwhile(store, policy, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.yaml").write_text("task: one")
    config = HarnessSuite(name="sums", tasks=("one",), include_path=str(tmp_path / "tasks"))
    before = content_digests(config)
    (tmp_path / "tasks" / "one.yaml").write_text("task: two")
    assert content_digests(config) != before
    with pytest.raises(ConfigError, match="has changed since the run was planned"):
        Workshop(store).run("evaluate_harness", config, {"policy": store.external(PolicyRef, policy)}, files=before)


def test_without_the_package_the_plan_names_the_extra(monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(evaluate_harness, "version", missing)
    rule = r"evaluate\.suites\.sums\.type = 'lm_eval': needs the package lm_eval, which is not installed; install the extra"
    with pytest.raises(ConfigError, match=rule):
        content_digests(HarnessSuite(name="sums", tasks=("sums",)))


def engines_of(policy: Path, leases: list[str], *, sampled: int = 64) -> Any:
    """Return engines that note each lease, with a sampler that says what it was asked."""
    from contextlib import contextmanager

    from rlhf_core.pretrained import load_tokenizer
    from rlhf_core.suites.harness import Engines

    class Asked:
        def generate(self, requests: Any, sampling: Any) -> Any:
            leases.extend(f"{len(one.prompt_ids)}+{sampling.max_tokens}" for one in requests)
            return [Completion((5,), (-0.5,), "t", "stop", 0, 0) for _ in requests]

        def logprobs(self, samples: Any, temperature: float) -> Any:
            return np.full(len(samples.token_ids), -1.0, np.float32)

        def top_logprobs(self, samples: Any, k: int, temperature: float) -> Any:
            return [SimpleNamespace(ids=[(0,)] * sum(one.loss_mask)) for one in samples]

    @contextmanager
    def leased(name: str) -> Any:
        leases.append(name)
        yield Asked()

    return Engines(
        tokenizer=load_tokenizer(policy),
        trainer=lambda: leased("trainer"),
        sampler=lambda: leased("sampler"),
        max_length=64,
        max_sampled_length=sampled,
        seed=1,
    )


def asks(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_questions_are_cut_to_what_the_sampler_takes_and_long_answers_refused_first(policy):
    from rlhf_core.suites.harness import EngineLM

    leases: list[str] = []
    model = EngineLM(engines_of(policy, leases, sampled=20))
    question = "What is 12 + 30? " * 20
    assert model.generate_until(asks((question, {"until": [], "max_gen_toks": 12}))) == ["t"]
    assert leases == ["sampler", "8+12"]
    with pytest.raises(ConfigError, match=r"max_gen_toks = 20: leaves no room for a question in the 20 tokens"):
        model.generate_until(asks((question, {"max_gen_toks": 12}), (question, {"max_gen_toks": 20})))
    assert leases == ["sampler", "8+12"]


def test_all_documents_are_scored_by_one_trainer(policy):
    from rlhf_core.suites.harness import EngineLM

    leases: list[str] = []
    model = EngineLM(engines_of(policy, leases))
    texts = ["What is 12?", "What is 12 + 30? " * 20, "It is 42."]
    assert model.loglikelihood_rolling(asks(*((text,) for text in texts))) == [
        -float(len(model.tok_encode(text))) for text in texts
    ]
    assert leases == ["trainer"]


@pytest.mark.parametrize(
    ("named", "headline", "rule"),
    [
        ("sums", "sums/exact", r"headline = 'sums/exact': is no measure of these tasks \(sums/acc, sums/acc_norm\)"),
        ("both", "both/exact", r"headline = 'both/exact': is no measure of these tasks \(sums/acc, .*both/acc\)"),
        ("both sums", "", r"tasks = \['both', 'sums'\]: cannot be loaded \(Duplicate task 'sums'.*; name each task"),
        ("s*", "", r"tasks = \['s\*'\]: cannot be loaded"),
        ("writes", "", r"max_gen_toks = 12: leaves no room for a question in the 12 tokens"),
    ],
)
def test_tasks_are_checked_before_an_engine_is_leased(policy, tasks, named, headline, rule):
    from rlhf_core.suites.harness import run_tasks

    leases: list[str] = []
    with pytest.raises(ConfigError, match=rule):
        run_tasks(
            engines_of(policy, leases, sampled=12),
            named.split(),
            include_path=str(tasks),
            num_fewshot=None,
            limit=None,
            apply_chat_template=False,
            headline=headline,
        )
    assert leases == []


def harness_results(value: Any) -> dict[str, Any]:
    return {
        "results": {"t": {"f1,none": value, "f1_stderr,none": np.float32(0.1)}},
        "samples": {},
        "higher_is_better": {},
    }


def test_numbers_of_numpy_count_and_what_is_no_number_is_named():
    from rlhf_core.suites.harness import harness_result

    assert harness_result(harness_results(np.float32(0.5)), headline="").measures["t/f1"]["mean"] == 0.5
    with pytest.raises(DataError, match=r"evaluate\.suites\.t/f1 = nan: is no finite number"):
        harness_result(harness_results(float("nan")), headline="")
