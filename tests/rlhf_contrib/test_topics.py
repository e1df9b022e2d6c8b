"""Rules of every topic of `rlhf_contrib`: its page, its commands, and the former names of its modules."""

import ast
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from pipelines.cli.main import ESTIMATE, VERBS, main, when_planned
from rlhf_core.config.agent_modules import AGENT_MODULES
from rlhf_core.config.agents import AgentConfig
from rlhf_core.config.data import ArithmeticWorld, InstructionsWorld, MixedWorlds, SupportWorld
from rlhf_core.errors import ConfigError
from rlhf_core.moved.names import MOVED
from rlhf_core.stage.code import module_digests
from rlhf_core.stage.key import key_payload, stage_code
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from stages.generate import GenerateConfig
from stages.prepare_data import PrepareDataConfig
from stages.table import STAGES

ROOT = Path(__file__).resolve().parents[2]
TOPICS = sorted(path.parent.name for path in ROOT.glob("rlhf_contrib/*/__init__.py"))
NAMES_TOPICS = {
    "pipelines/cli/main.py": "the table of commands",
    "rlhf_core/moved/names.py": "the table of former names",
    "rlhf_core/config/data.py": "the modules of worlds",
    "rlhf_core/stage/corrections.py": "reward functions of worlds had no fault",
    "rlhf_core/config/agent_modules.py": "the table of agents",
    "rlhf_core/config/runtime.py": "the module of a sampler",
    "pipelines/cli/extras.py": "a topic is not installed",
    "pipelines/cli/run_command.py": "names of loggers",
    "rlhf_core/user_code/syntax.py": "the code of topics counts",
}
"""File of the core that names the package -> why."""


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_has_a_page_that_says_what_it_promises_and_how_it_is_tested(topic):
    page = (ROOT / "rlhf_contrib" / topic / "README.md").read_text(encoding="utf-8")
    assert "A topic of [rlhf_contrib](../../docs/contrib.md): it may change in any release." in page
    assert f"make test TESTS=tests/rlhf_contrib/{topic}\n" in page
    assert (ROOT / "tests/rlhf_contrib" / topic).is_dir()


@pytest.mark.parametrize(
    ("verb", "place"),
    [(verb, place) for verb, place in (VERBS | {"plan --estimate": ESTIMATE}).items() if "contrib" in place],
)
def test_a_command_of_a_topic_is_in_it_and_says_so_if_the_topic_is_missing(verb, place, monkeypatch, capsys):
    module, _, function = place.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    monkeypatch.setitem(sys.modules, module, None)  # as without the file
    assert main(WORDS[verb]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"rlhf {verb.split()[0]}: needs {module}, which is not installed; "
        "install the whole wheel of rlhf-lifecycle, which has all topics\n"
    )


@pytest.mark.parametrize("missing", ["no_such_package.planner.verb:warn", "rlhf_contrib.no_such_topic.verb:warn"])
def test_a_run_goes_on_without_the_topic_that_looks_at_its_plan(missing, monkeypatch):
    monkeypatch.setattr("pipelines.cli.main.WHEN_PLANNED", missing)
    when_planned("config", "planned", "store")


def test_the_core_names_topics_only_in_its_tables_and_in_former_modules():
    """`lint-imports` does not see a module that is imported by a name made at run time."""
    files = [path for package in ("rlhf_core", "stages", "pipelines") for path in (ROOT / package).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    naming = {path for path, text in texts.items() if "rlhf_contrib" in text and names_a_topic(text)}
    assert naming == set(NAMES_TOPICS)


def names_a_topic(text: str) -> bool:
    """True for a module with the name of the package in a string that is no docstring."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    return any("rlhf_contrib" in str(node.value) for node in constants)


@pytest.mark.parametrize(("kind", "module"), AGENT_MODULES.items())
def test_the_code_of_an_agent_is_that_of_its_module_too_and_a_missing_module_is_named(kind, module, monkeypatch):
    """`rlhf plan` compares these digests with those of a result."""
    agent = TypeAdapter(AgentConfig).validate_python(AGENTS[kind])
    spec = STAGES["generate"].spec(GenerateConfig(agent=agent), {}, label="generate", seed=0, engines={})
    added = stage_code(spec).items() - stage_code(replace(spec, config=GenerateConfig())).items()
    assert dict(added)[module] == module_digests(module)[module]
    monkeypatch.setitem(AGENT_MODULES, kind, "rlhf_contrib.no_such_topic")
    with pytest.raises(
        ConfigError, match=r"module = 'rlhf_contrib\.no_such_topic': is not installed; install the whole"
    ):
        stage_code(spec)


AGENTS = {
    "program": {"type": "program", "command": ["true"]},
    "openrlhf": {"type": "openrlhf", "file": "a.py"},
    "openenv": {"type": "openenv", "url": "http://a"},
    "nemo_gym": {"type": "nemo_gym", "url": "http://a"},
    "verifiers": {"type": "verifiers", "python": "python", "environment": "e"},
}
WORDS = {
    "import-openrlhf": ["import-openrlhf", "train.sh"],
    "plan --estimate": ["plan", "tiny/full", "--estimate"],
    "sweep": ["sweep", "tiny/full"],
    "scaffold": ["scaffold", "slurm", "--out", "x"],
    "serve": ["serve", "ppo"],
    "serve-reward": ["serve-reward", "--function", "a.py:b"],
}


@pytest.mark.parametrize(("former", "present"), MOVED.items())
def test_a_former_name_of_a_module_is_the_module_and_warns_of_the_new_name(former, present, monkeypatch):
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{former}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning, match=f"{former} is now {present}; the former name works until 0.4") as said:
        module = importlib.import_module(former)
    assert module is importlib.import_module(present) and len(said) == 1


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("pipelines.importers.openrlhf.translate", "rlhf_contrib.openrlhf.translate"),
        ("rlhf_core.data.worlds.support", "rlhf_contrib.worlds.support"),
        ("stages.config.sft", "stages.sft"),
        ("stages.config.measured", "stages.measured"),
    ],
)
def test_the_modules_of_a_package_that_moved_have_former_names_too(former, present, monkeypatch):
    for name in [name for name in sys.modules if former.startswith(name) and name.rpartition(".")[0] in former]:
        if name in MOVED or name == former:
            monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning, match="the former name works until 0.4") as said:
        module = importlib.import_module(former)
    assert module is importlib.import_module(present) and len(said) == 1


def test_the_code_of_a_world_is_in_the_key_of_the_stage_that_makes_its_data():
    """`prepare_data` imports it by the name in the configuration, which its own imports do not show."""
    world = PrepareDataConfig(data=MixedWorlds(worlds=(SupportWorld(), ArithmeticWorld())))
    spec = STAGES["prepare_data"].spec(world, {}, label="prepare_data", seed=0, engines={})
    files = replace(spec, config=PrepareDataConfig(data=InstructionsWorld()))
    assert {"rlhf_contrib.worlds.mixed", "rlhf_contrib.worlds.support"} <= set(stage_code(spec))
    assert "rlhf_contrib.worlds.support" not in stage_code(files)
    assert key_payload(spec)["code"] == sha256_text(canonical_json(stage_code(spec)))
    assert key_payload(spec)["code"] != key_payload(files)["code"]
