"""A stage, a sampler and a reward of a user's package, named by path in a profile: read, planned, run, and in the keys."""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cli.options import plan_options
from pipelines.cli.plan_verbs import plan as plan_verb
from pipelines.execution.executor import RunContext, RunOptions
from pipelines.execution.opening import open_executor, open_run, plan_run, store_of
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.flows.steps import own_tables
from pipelines.prefect_flows import deployments
from pipelines.services.home import Home
from rlhf_contrib.ray_jobs.executor import restore_stage, stored_stage
from rlhf_core.data.shards import read_generations
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import StageSpec, key_payload, stage_code
from rlhf_core.tracking.memory import MemoryTracker
from stages.table import STAGES
from tests.support.listener import Notes

DOCS = Path(__file__).resolve().parents[3] / "docs"
PROFILE = """
name = "desk"
[runtime]
type = "local"
trainer = {engine = "torch"}
sampler = {type = "desk.samplers:FixedConfig", text = "It is 12."}
[prepare_data]
data = {type = "support", demonstrations = 16, preferences = 4, prompts = 4, eval_demonstrations = 8, \
eval_preferences = 4, eval_prompts = 4}
model = {type = "init", vocab_size = 400, hidden_size = 32, layers = 1, heads = 2, kv_heads = 2, intermediate_size = 64}
[recipe.short]
stage = "desk.stages:shorten"
max_characters = 120
[recipe.answers]
stage = "generate"
policy = "base"
samples_per_prompt = 1
sampling = {max_tokens = 20}
[recipe.scores]
stage = "score"
generations = "answers"
rewards.terms.brief = {type = "function", function = "desk.rewards:brief"}
"""
SAMPLERS = '''
from typing import ClassVar

from rlhf_core.config.engines import BaseSamplerConfig


class FixedConfig(BaseSamplerConfig):
    """Answers every prompt with the same text."""

    module: ClassVar[str] = "desk.fixed"
    text: str = "It is 42."
    max_model_len: int = 256
'''
STAGE = '''
from typing import Annotated

from desk.options import ShortenConfig
from rlhf_core.types import DemonstrationsRef
from stages import measured
from stages.declaration import From, stage


@stage(version=1, code="strict", engines=(), metrics=measured.fixed("train", "eval"), module="desk.shorten")
def shorten(
    config: ShortenConfig, *, demonstrations: Annotated[DemonstrationsRef, From("prepare_data.demonstrations")]
) -> DemonstrationsRef:
    """The `demonstrations` with short answers."""
'''
REWARDS = "def brief(generations):\n    return [-float(len(one.completion.text)) for one in generations]\n"


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Iterator[Path]:
    """The package, in the working folder, where `rlhf` finds it."""
    folder = tmp_path / "desk"
    folder.mkdir()
    declared, work = stage_of_the_page()
    _, fixed = re.findall(r"```python\n(.*?)```", (DOCS / "add_a_sampler.md").read_text(), re.DOTALL)[:2]
    fixed = fixed.replace(
        "from rlhf_core.config.runtime import FixedSamplerConfig", "from desk.samplers import FixedConfig"
    )
    files = {
        "__init__": "",
        "samplers": SAMPLERS,
        "fixed": fixed.replace("FixedSamplerConfig", "FixedConfig"),
        "stages": STAGE,
        "options": declared.partition("\n\n\n@stage")[0],
        "shorten": work.replace("stages.shorten", "desk.options"),
        "rewards": REWARDS,
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    yield folder
    STAGES.pop("desk.stages:shorten", None)
    own_tables.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "desk"]:
        del sys.modules[name]


def stage_of_the_page() -> tuple[str, str]:
    """The texts of the files `__init__.py` and `run.py`."""
    page = (DOCS / "add_a_stage.md").read_text()
    declared, work = re.findall(r"```python\n# stages/\S+\.py\n(.*?)```", page, re.DOTALL)
    return declared, work


@pytest.fixture
def config(desk) -> PipelineConfig:
    (desk.parent / "desk.toml").write_text(PROFILE)
    return load_profile("desk.toml")


def spec_of(config: PipelineConfig, home: Home, label: str) -> StageSpec:
    planned = plan_run(config, lifecycle, RunOptions(), store=store_of(config, home))
    return next(one.spec for one in planned if one.label == label)


def test_a_profile_runs_with_them(config, home):
    with open_run(config, lifecycle, RunOptions(), home=home, tracker=MemoryTracker(), listener=Notes()) as opened:
        made = run_stages(opened, lifecycle, opened.directly, tags={})
    store = store_of(config, home)
    rows = read_demonstrations(store.path(made["short"]) / "train.parquet")
    assert rows and max(len(one.messages[-1].content) for one in rows) <= 120
    answers = read_generations(store.path(made["answers"]))
    assert {one.completion.text for one in answers} == {"It is 12."}
    again = plan_run(config, lifecycle, RunOptions(), store=store)
    assert {one.decision.action for one in again} == {"HIT"}
    assert store.record(again[-1].decision.key).metrics["reward/mean"] == -9.0  # the length of "It is 12."


def test_a_package_and_a_profile_of_the_version_before_work_with_a_warning_for_each_former_name(
    desk, home, monkeypatch
):
    """Each part imports a module that has moved, or a name that has."""
    sampler = SAMPLERS.replace("import BaseS", "import HFSamplerConfig, BaseS").replace(
        "= 256", "= HFSamplerConfig().batch_size + 224"
    )
    (desk / "samplers.py").write_text(sampler)
    for part, line in (
        ("shorten", "from rlhf_core.models.loading import materialize\nfrom stages.sft import open_exports\n"),
        ("rewards", "from rlhf_core.data.worlds.support import facts_of\n"),
    ):
        (desk / f"{part}.py").write_text(line + (desk / f"{part}.py").read_text())
    declared = STAGE.replace("stages import measured", "stages.config import measured")
    (desk / "stages.py").write_text(declared.replace("stages.declaration", "stages.table"))
    gold = (
        'rewards.terms.gold = {type = "function", function = "rlhf_core.data.worlds.support_readers:reader_reward"}\n'
    )
    (desk.parent / "desk.toml").write_text(PROFILE + gold)
    for module, name in (
        ("rlhf_core.config.engines", "HFSamplerConfig"),
        ("rlhf_core.models.loading", "materialize"),
        ("stages.sft", "open_exports"),
    ):
        vars(importlib.import_module(module)).pop(name, None)
    for name in [name for name in sys.modules if name.startswith(("rlhf_core.data.worlds", "stages.config"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning) as said:
        config = load_profile("desk.toml")
        with open_run(config, lifecycle, RunOptions(), home=home, tracker=MemoryTracker(), listener=Notes()) as opened:
            made = run_stages(opened, lifecycle, opened.directly, tags={})
    texts = {str(one.message) for one in said if one.category is FutureWarning}
    assert {text.partition(" is now ")[0] for text in texts} == {
        "rlhf_core.config.engines.HFSamplerConfig",
        "rlhf_core.models.loading.materialize",
        "rlhf_core.data.worlds",
        "stages.config",
        "stages.sft.open_exports",
        "stages.table.From",
        "stages.table.stage",
    }
    assert {"short", "answers", "scores"} <= made.keys()


def test_their_code_is_in_the_keys(config, home, desk):
    before = {label: key_payload(spec_of(config, home, label)) for label in ("short", "answers", "scores")}
    assert before["short"]["stage"] == "desk.stages:shorten" and before["short"]["version"] == 1
    assert before["answers"]["engines"]["sampler_code"].keys() == {"desk.samplers:FixedConfig", "desk.fixed:ENGINE"}
    for name in ("shorten", "fixed", "rewards"):
        file = desk / f"{name}.py"
        file.write_text(file.read_text() + "\nCHANGED = 1\n")
    after = {label: key_payload(spec_of(config, home, label)) for label in before}
    assert after["short"]["code"] != before["short"]["code"]
    assert after["answers"]["engines"] != before["answers"]["engines"]
    assert after["scores"]["config"] != before["scores"]["config"]


def test_a_strict_stage_counts_the_modules_that_its_own_import(config, home, desk):
    (desk / "helper.py").write_text("LONGEST = 1\n")
    (desk / "shorten.py").write_text("from desk.helper import LONGEST\n" + (desk / "shorten.py").read_text())
    before = stage_code(spec_of(config, home, "short"))
    (desk / "helper.py").write_text("LONGEST = 2\n")
    after = stage_code(spec_of(config, home, "short"))
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"desk.helper"} and "rlhf_core.data.tables" in after


def test_a_package_has_its_work_in_run_without_naming_it(config, home, desk):
    (desk / "brief").mkdir()
    for name, text in zip(("__init__", "run"), stage_of_the_page()):
        (desk / "brief" / f"{name}.py").write_text(text.replace("stages.shorten", "desk.brief"))
    config = load_profile("desk.toml", ["recipe.short.stage=desk.brief:shorten"])
    spec = spec_of(config, home, "short")
    assert (spec.name, spec.module) == ("desk.brief:shorten", "desk.brief.run")
    assert {"desk.brief.run", "desk.brief", "desk"} == {name for name in stage_code(spec) if name.startswith("desk")}
    options = RunOptions(until="short")
    with open_run(config, lifecycle, options, home=home, tracker=MemoryTracker(), listener=Notes()) as opened:
        made = run_stages(opened, lifecycle, opened.directly, tags={})
    rows = read_demonstrations(store_of(config, home).path(made["short"]) / "train.parquet")
    assert rows and max(len(one.messages[-1].content) for one in rows) <= 120
    del STAGES["desk.brief:shorten"]


def test_plan_names_the_files_that_a_run_will_import(config, home, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    parser = argparse.ArgumentParser()
    plan_options(parser)
    plan_verb(parser.parse_args(["desk.toml", "--json"]))
    files = ["__init__", "fixed", "options", "rewards", "samplers", "shorten", "stages"]
    assert sorted(json.loads(capsys.readouterr().out)["imports"]) == [f"desk/{name}.py" for name in files]
    plan_verb(parser.parse_args(["desk.toml"]))
    assert "imports: desk/" in capsys.readouterr().out


def test_a_stage_of_a_profile_has_no_deployment(config):
    """Forms in Prefect are those of our stages, whatever profiles this process has read."""
    assert "desk.stages:shorten" in STAGES
    assert {one.name for one in deployments.deployments()} >= {"sft", "score"}
    assert not any("desk" in one.name for one in deployments.deployments())


def test_a_profile_with_them_can_be_written_and_read_and_sent_to_a_job(config, home):
    again = PipelineConfig.model_validate(config.model_dump(mode="json", exclude_none=True))
    assert again == config
    spec = spec_of(config, home, "short")
    assert key_payload(restore_stage(json.loads(json.dumps(stored_stage(spec))))) == key_payload(spec)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runtime.sampler.type=desk.none:Fixed", "importing desk.none fails: ModuleNotFoundError"),
        ("runtime.sampler.type=desk.samplers:Fixed", "desk.samplers has no Fixed; fix the name"),
        ("runtime.sampler.type=desk.rewards:brief", "must be a subclass of rlhf_core.config.engines.BaseSamplerConfig"),
        ("runtime.sampler.txt=a", "unknown key"),
        ("recipe.short.stage=desk.rewards:brief", "must be a declaration with `stages.declaration.stage`"),
        ("recipe.short.max_characters=0", "max_characters"),
    ],
)
def test_what_is_wrong_with_them_is_said_by_key(config, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_profile("desk.toml", [override])


def test_an_executor_of_the_users_is_called_with_the_run(config, home, desk):
    (desk / "executors.py").write_text(
        "class Mine:\n    def __init__(self, context):\n        self.context = context\n"
    )
    config = load_profile("desk.toml", ["runtime.execution=desk.executors:Mine"])
    context = RunContext(config, RunOptions(), store_of(config, home), MemoryTracker(), Notes())
    executor = open_executor(context)
    assert type(executor).__name__ == "Mine" and executor.context is context
    missing = load_profile("desk.toml", ["runtime.execution=desk.executors:Other"])
    with pytest.raises(ConfigError, match="executors has no Other"):
        open_executor(replace(context, config=missing))
