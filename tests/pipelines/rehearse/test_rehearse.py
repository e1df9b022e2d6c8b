"""A rehearsal of a small profile: one planted fault of each class is found, and without faults nothing is."""

import json
import tomllib
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.cli.main import main
from pipelines.flows.full import graph
from pipelines.flows.profile import load_profile, parse, profile_names
from pipelines.rehearse import problems
from pipelines.rehearse.cut import cut_profile, exported_names
from pipelines.rehearse.rows import few, write_used_tokens
from pipelines.rehearse.runner import rehearse
from pipelines.rehearse.servers import Servers, silent_engines
from rlhf_core.config.models import InitModel
from rlhf_core.config.rewards import JudgeReward
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.pretrained import load_tokenizer
from rlhf_core.types import Message, Prompt
from tests.support.chat_server import ChatServer

PROFILE = """
name = "rehearsed"

[runtime]
type = "local"
trainer = {engine = "torch"}
sampler = {type = "hf"}

[prepare_data]
max_prompt_tokens = 64
max_tokens = 160

[prepare_data.model]
type = "pretrained"
path = "model"

[prepare_data.data]
type = "files"
sources = [{name = "sums", path = "rows.jsonl", use = {demonstrations = 0.5, prompts = 0.3, eval_prompts = 0.2}}]

[sft]

[ppo]
start_from = "sft"
samples_per_prompt = 8
advantage = "grpo"
kl = {in = "loss"}
rewards.terms.sum = {type = "function", function = "rewards.py:right"}

[recipe.answers]
stage = "generate"
policy = "sft"

[recipe.scored]
stage = "score"
generations = "answers"
rewards.terms.sum = {type = "function", function = "rewards.py:right"}

[recipe.best]
stage = "select"
type = "best_of_n"
rollouts = "scored"

[[gates]]
after = "ppo"
metric = "reward/mean"
op = ">="
value = 0.5
"""
REWARDS = """
from pathlib import Path

def right(generations):
    return [float(one.prompt.label in one.completion.text) for one in generations]

def breaks(generations):
    return [1.0 / len(one.completion.text) for one in generations]

def constant(generations):
    return [0.25 for one in generations]

def needs(generations, threshold):
    return [float(len(one.completion.text) > threshold) for one in generations]

def by_prompt(generations):
    return [float(len(one.prompt.messages[0].content) % 7) for one in generations]
"""
READS = """
from pathlib import Path

def listed(generations):
    words = Path(__file__).with_name("words.txt").read_text().split()
    return [float(any(word in one.completion.text for word in words)) for one in generations]
"""
NO_THOUGHTS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'].split('</think>')[-1] + "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FAULTS = """
prepare_data.chat_template = "no_thoughts.jinja"
runtime.trainer.attention = "flash_attention_2"
ppo.rewards.terms.sum.function = "rewards.py:by_prompt"
recipe.answers.sampling.max_tokens = 250
recipe.adapted = {stage = "sft", policy = "base", lora = {target_modules = ["q_prj"]}}
gates.ppo.metric = "reward/sum"

[recipe.scored.rewards.terms]
breaks = {type = "function", function = "rewards.py:breaks"}
constant = {type = "function", function = "rewards.py:constant"}
needs = {type = "function", function = "rewards.py:needs"}
listed = {type = "function", function = "reads.py:listed"}
judge = {type = "judge", url = "http://127.0.0.1:9/v1", model = "judge", template = "Rate {completion}"}
"""
EXPECTED = {
    problems.ROWS: "prepare_data.data = 'sums': 1 of 41 rows are dropped: prompt too long: ",
    problems.TEMPLATE: "prepare_data.chat_template = 'no_thoughts.jinja': the template does not render thoughts of row ",
    problems.REWARD_FAILS: "recipe.scored.rewards.terms.breaks = 'rewards.py:breaks': fails: ",
    problems.REWARD_CONSTANT: "recipe.scored.rewards.terms.constant = 'rewards.py:constant': is 0.25 for each of ",
    problems.REWARD_ARGUMENTS: "recipe.scored.rewards.terms.needs = 'rewards.py:needs': fails: ",
    problems.GROUPS: "ppo.rewards = ['sum']: the written answers to each of 4 prompts have the same reward; ",
    problems.CONTEXT: "recipe.answers.sampling.max_tokens = 250: the longest prompt of prompts has ",
    problems.GATES: "gates[0].metric = 'reward/sum': ppo measures no such number; ",
    problems.ADAPTERS: "lora.target_modules = ('q_prj',): the model has no linear modules ['q_prj']; ",
    problems.PACKAGES: "runtime.trainer.attention = 'flash_attention_2': needs the package flash_attn, which is not installed; ",
    problems.UNSEEN: "recipe.scored.rewards.terms.listed.function = 'reads.py:listed': reads.py reads files (",
    problems.SERVERS: "recipe.scored.rewards.terms.judge.url = 'http://127.0.0.1:9/v1': does not respond (",
}
"""Class of a fault -> the beginning of its problem."""


def write_files(folder):
    """Write the rows, rewards, template and model of the profile."""
    rows = [
        {
            "prompt": f"What is {left} + 2?",
            "completion": f"<think>\n{left} and two more.\n</think>\n\nIt is {left + 2}.",
            "label": str(left + 2),
        }
        for left in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "reads.py").write_text(READS)
    (folder / "words.txt").write_text("It So")
    (folder / "no_thoughts.jinja").write_text(NO_THOUGHTS)
    model = InitModel(vocab_size=400, hidden_size=64, layers=3, heads=2, kv_heads=2, max_positions=256)
    train_tokenizer((row["prompt"] + row["completion"] for row in rows), vocab_size=400, folder=folder / "model")
    initialize_llama(model, folder / "model", seed=1)


def with_faults(profile):
    """The table of the profile with a fault of each class."""
    faults = tomllib.loads(FAULTS)
    gate = faults.pop("gates")["ppo"]

    def merge(table, changes):
        return table | {
            key: merge(table.get(key, {}), value) if isinstance(value, dict) else value
            for key, value in changes.items()
        }

    merged = merge(profile, faults)
    merged["recipe"]["scored"]["rewards"]["terms"].pop("sum")
    return merged | {"gates": [profile["gates"][0] | gate]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("rehearsed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.setenv("RLHF_HOME", str(made / "home"))
        write_files(made)
        yield made


@pytest.fixture(scope="module")
def clean(folder):
    return rehearse(parse(tomllib.loads(PROFILE), origin="clean"))


@pytest.fixture(scope="module")
def faulty(folder, clean):
    rows = (folder / "rows.jsonl").read_text()
    long = {"prompt": "What is " + "1 + " * 200 + "2?", "completion": "<think>\nMuch.\n</think>\n\nIt is 202."}
    (folder / "rows.jsonl").write_text(f"{rows}{json.dumps(long | {'label': '202'})}\n")
    return rehearse(parse(with_faults(tomllib.loads(PROFILE)), origin="faulty"))


def test_nothing_is_found_in_a_profile_without_faults_and_every_stage_runs(clean):
    assert clean.problems == []
    assert {one.label for one in clean.nodes} == {"prepare_data", "sft", "answers", "scored", "best", "ppo"}
    assert {one.state for one in clean.nodes} == {"ran"}


def test_stages_that_do_not_need_a_failed_one_still_run(faulty):
    states = {one.label: one.state for one in faulty.nodes}
    assert (states["scored"], states["best"], states["adapted"]) == ("failed", "after scored", "failed")
    assert states["ppo"] == "ran"


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_planted_fault_is_found_and_named_by_its_key(kind, faulty):
    texts = [problem.text for problem in faulty.problems if problem.kind == kind]
    assert any(text.startswith(EXPECTED[kind]) for text in texts), texts


def test_the_cuts_are_listed_with_both_values(clean):
    cuts = [str(cut) for cut in clean.cuts]
    assert "ppo.steps: 100 -> 2" in cuts
    assert "sft.loop.batch_size: 32 -> 4" in cuts
    assert "recipe.scored.rewards.terms.rehearsal: None -> function" in cuts


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_keeps_its_graph(name):
    config = load_profile(name)
    cut, _ = cut_profile(config, lambda value, key: value)
    names = exported_names(config)
    assert outline(graph(cut), {}) == outline(graph(config), names)


def outline(nodes, names):
    """Labels, stages and inputs of nodes, with the names of policies that are exported at other steps."""
    found = []
    for node in nodes:
        inputs = {kind: [renamed(name, names) for name in read] for kind, read in node.reads().items()}
        found.append((renamed(node.label, names), node.stage, inputs))
    return found


def renamed(label, names):
    """A label in which each part has its other name."""
    return "/".join(names.get(part, part) for part in label.split("/"))


@pytest.mark.slow
def test_the_command_of_the_page_finds_nothing(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs/recipes.md").read_text(encoding="utf-8")
    (command,) = [line for line in page.splitlines() if line.startswith("rlhf rehearse ")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    assert main(command.split()[1:]) == 0
    assert "reports/tulu3: 26 ran; 0 problems; " in capsys.readouterr().out


def test_the_long_row_and_one_of_each_source_are_kept():
    # Rows of 1 to 6 signs: the longest of all comes first, then the sources in turn.
    rows = [Prompt(str(at), (Message("user", "a" * at),), "", "xy"[at % 2]) for at in range(1, 7)]
    assert [row.id for row in few(rows, 2)] == ["6", "1", "2", "3"]


def test_a_model_from_nothing_keeps_the_weights_of_its_tokens(tmp_path):
    model = InitModel(vocab_size=5000, hidden_size=64, layers=1, heads=2, kv_heads=2, max_positions=64)
    train_tokenizer(["two and two"], vocab_size=5000, folder=tmp_path / "whole")
    initialize_llama(model, tmp_path / "whole", seed=1)
    write_used_tokens(tmp_path / "whole", tmp_path / "used")
    whole, used = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "used"))
    tokens = len(load_tokenizer(tmp_path / "used"))
    assert (whole.vocab_size, used.vocab_size) == (5000, tokens)
    assert torch.equal(used.get_input_embeddings().weight, whole.get_input_embeddings().weight[:tokens])


def test_a_server_of_a_sampler_that_accepts_no_connection_is_named():
    (text,) = silent_engines(["http://127.0.0.1:9"])
    assert text.startswith("runtime.sampler.urls[0] = 'http://127.0.0.1:9': does not respond (")


def test_a_judge_is_asked_five_times_and_its_replies_are_repeated():
    served = ChatServer()
    served.says = lambda asked: f"Score: {len(served.requests)}"
    term = JudgeReward(url=served.url, model="judge", template="Rate {completion}")
    servers = Servers()
    with closing(served), servers.open():
        routed = servers.in_place(term, "ppo.rewards.terms.judge")
        scores = [ask(routed.url) for _ in range(7)]
    assert scores == [f"Score: {number}" for number in (1, 2, 3, 4, 5, 1, 2)]
    assert len(served.requests) == 5
    assert servers.problems() == []


def ask(url):
    """The words of a chat server."""
    body = json.dumps({"messages": [{"role": "user", "content": "Rate it"}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", data=body), timeout=10) as response:
        return json.loads(response.read())["choices"][0]["message"]["content"]
