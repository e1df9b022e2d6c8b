import operator
import os
import re
from pathlib import Path

import pytest

from pipelines.execution.plan import all_specs
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import find_profile, load_profile, parse, profile_names, with_overrides
from pipelines.flows.profile_text import as_table
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import FIELD_OF, Config, tag_of
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import stage_key


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads(name):
    assert load_profile(name).name


def test_the_tiny_profiles_are_shipped():
    assert {"tiny/full", "tiny/rlvr"} <= set(profile_names())


def test_an_override_changes_one_value_and_keeps_its_type():
    config = load_profile("tiny/full", ["ppo.kl.coef=0.125", "name=night run", "ppo.advantage.whiten=false"])
    assert (config.ppo.kl.coef, config.name, config.ppo.advantage.model_dump()["whiten"]) == (0.125, "night run", False)


def test_an_override_of_none_takes_a_section_away():
    assert load_profile("tiny/full", ["ppo=none", "publish=none"]).ppo is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.kl_coeff=0.1", "ppo.kl_coeff = 0.1: unknown key; did you mean ppo.kl.coef?"),
        ("sft.loop.epoch=2", "sft.loop.epoch = 2: unknown key; did you mean sft.loop.epochs?"),
        ("ppo.stalenes=2", "ppo.stalenes = 2: unknown key; did you mean ppo.ahead.steps?"),
        ("ppo.partial=true", "ppo.partial = True: unknown key; did you mean ppo.ahead.tokens?"),
        ("pppo.steps=2", "pppo = {'steps': 2}: unknown key; did you mean ppo?"),
        (
            "runtime.sampler.kv_cash_gib=2",
            "runtime.sampler.kv_cash_gib = 2: unknown key; did you mean runtime.sampler.kv_cache_gib?",
        ),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_one(override, message):
    with pytest.raises(ConfigError) as caught:
        load_profile("tiny/full", [override])
    assert str(caught.value) == message


def test_a_bad_value_names_key_value_rule_and_remedy():
    with pytest.raises(ConfigError) as caught:
        load_profile("tiny/full", ["ppo.kl.coef=-1"])
    assert str(caught.value) == (
        "ppo.kl.coef = -1: must be greater than or equal to 0; change it in tiny/full or with --set ppo.kl.coef=..."
    )


def test_a_bare_name_chooses_a_loss_with_its_defaults():
    short = load_profile("tiny/full", ["ppo.loss=gspo", "iterative_dpo.dpo.loss=ipo"])
    long = load_profile("tiny/full", ["ppo.loss.type=gspo", 'iterative_dpo.dpo.loss={type = "ipo"}'])
    assert short == long
    with pytest.raises(ConfigError, match=r"ppo\.loss"):
        load_profile("tiny/full", ["ppo.loss=gpso"])


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("[ppo.loss]\nclip_low = 0.1\n", [], {"loss.clip_low": 0.1}),
        ("", ["ppo.loss.clip_low=0.1", "ppo.kl.coef=0.2"], {"loss.clip_low": 0.1, "kl.coef": 0.2, "kl.in_": "reward"}),
        ("[ppo.kl]\nin = 'loss'\n", ["ppo.kl.coef=0.2"], {"kl.in_": "loss", "kl.coef": 0.2}),
        ("ppo.loss = 'gspo'\n", ["ppo.loss.clip_low=0.1"], {"loss.type": "gspo", "loss.clip_low": 0.1}),
        ("[ppo]\nkl_coef = 0.3\nkl_target = 2.0\n", ["ppo.kl_coef=0.2"], {"kl.coef": 0.2, "kl.target": 2.0}),
        ("[ppo]\nkl_in = 'loss'\n", ["ppo.kl.estimator=k3"], {"kl.coef": 0.05, "kl.in_": "loss", "kl.estimator": "k3"}),
        ("[ppo]\nstaleness = 1\n", ["ppo.partial_tokens=8"], {"ahead.tokens": 8, "ahead.staleness": 1}),
        ("[ppo]\nstaleness = 1\n", ["ppo.ahead.steps=2"], {"ahead.steps": 2}),
        ("[ppo]\nstaleness = 1\n", ["ppo.staleness=0"], {"ahead": None}),
        ("[ppo]\nahead = 'staleness'\n", ["ppo.staleness=none"], {"ahead": None}),
        ("[ppo.value_optimizer]\neps = 0.1\n", [], {"value.optimizer.eps": 0.1, "value.optimizer.learning_rate": 5e-4}),
        ("[ppo]\nkl_coef = 'none'\n", [], {"kl.coef": 0.05}),
        ("[ppo.rewards]\nnormalise = 'running'\n", ["ppo.rewards.normalize=none"], {"rewards.normalize": "none"}),
        ("[ppo]\nahead = 'staleness'\n", ["ppo.dynamic_sampling={}", "ppo.samples_per_prompt=2"], {"ahead.type": "dynamic"}),
        ("publish.licence = 'MIT'\n[ppo.lora]\nquantize = 'nf4'\n", ["ppo.lora.quantise="], {"lora.quantize": ""}),
    ],
)  # fmt: skip
def test_the_default_type_holds_until_another_is_named_and_former_names_are_read(tmp_path, text, overrides, expected):
    profile = tmp_path / "mine.toml"
    profile.write_text(f"extends = 'tiny/full'\n{text}")
    config = load_profile(profile, overrides)
    assert {key: operator.attrgetter(key)(config.ppo) for key in expected} == expected
    changed = parse(with_overrides(as_table(config), ["ppo.kl.coef=0.7"]), origin="dump")
    assert changed.ppo == load_profile(profile, [*overrides, "ppo.kl.coef=0.7"]).ppo


def without_types(config: Config, dropped: list[str]) -> dict[str, object]:
    """Return a configuration as a tree in which tables of the type of their default name no type; add these to `dropped`."""
    tree: dict[str, object] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        key = field.alias or name
        if isinstance(value, Config):
            tree[key] = inner = without_types(value, dropped)
            tag = tag_of(type(value))[0]
            if tag and type(field.default) is type(value) and inner[tag] == getattr(field.default, FIELD_OF[tag]):
                dropped.append(f"{key}.{tag} = {inner.pop(tag)}")
        elif value is not None:
            tree[key] = value
    return tree


@pytest.mark.parametrize("profile", profile_names())
def test_every_table_of_the_type_of_its_default_may_leave_the_type_out(profile):
    dropped: list[str] = []
    config = load_profile(profile)
    tree = without_types(config, dropped)
    assert len(dropped) >= (1 if profile.startswith("reports/") else 2)  # which have engines of no default type
    assert parse(tree, origin=profile) == config


def test_another_type_does_not_inherit_the_options_of_the_one_before(tmp_path):
    (tmp_path / "base.toml").write_text(
        '[prepare_data]\n[dpo]\nstart_from = "base"\nloss = {type = "dpo", beta = 0.3}\n'
    )
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n[dpo.loss]\ntype = "simpo"\n')
    config = load_profile(child)
    assert config.dpo.loss.model_dump() == {"type": "simpo", "beta": 2.0, "gamma": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["distill.teachers.ppo=1.0"], r"distill\.teachers\.ppo = 1\.0: the profile has no \[ppo\]; add that section"),
        (["distill.teachers={sft = 1.0, ppo = 2.0}"], r"distill\.teachers\.ppo = 2\.0: the profile has no \[ppo\]"),
        (
            ["distill.teachers.sft=1.0", "distill.start_from=sft"],
            r"teachers\.sft = 1\.0: the student starts from the same",
        ),
        (
            ["distill.teachers.sft=0.0"],
            r"teachers = \{sft = 0\.0\}: the weights add up to 0; give one of them a positive",
        ),
        (["distill.teachers.sft=-1.0"], r"distill\.teachers\.sft"),
        (["distill.teachers.distill=1.0"], r"teachers\.distill = 1\.0: there is no such teacher; name one of sft, "),
        (["distill.external.big.path=/big"], r"external\.big = .*: has no weight; add distill\.teachers\.big = 1\.0"),
        (
            ["distill.external.sft.path=/big", "distill.teachers.sft=1.0"],
            r"external\.sft = .*: is the name of a section; give the policy another name",
        ),
        (
            ["distill.external.conditional_sft.path=/big", "distill.teachers.conditional_sft=1.0"],
            r"external\.conditional_sft = .*: is the name of a section; give the policy another name",
        ),
        (["distill.teachers.pppo=1.0"], r"teachers\.pppo = 1\.0: .*, or add distill\.external\.pppo"),
        (
            ["distill.divergence.kind=uld", "distill.kl_weight=1"],
            r"kl_weight = 1\.0: .*set divergence\.kind = \"uld_text\"",
        ),
    ],
)
def test_teachers_are_checked_before_anything_runs(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_profile("tiny/distill", ["distill.teacher=none", *changes])


def test_a_teacher_beside_teachers_is_refused_and_its_default_is_not():
    weights = ["distill.teachers={big = 1.0}", "distill.external.big.path=/big"]
    with pytest.raises(ConfigError, match=r"distill\.teacher = 'sft': is not read beside teachers.*remove it"):
        load_profile("tiny/distill", weights)
    config = load_profile("tiny/distill", ["distill.teacher=none", *weights])
    assert parse(as_table(config), origin="dump").distill == config.distill  # written with all defaults


@pytest.mark.parametrize(
    ("profile", "overrides", "error"),
    [
        (
            "tiny/full",
            ['gates=[{after = "evaluate", metric = "policies/ppo/sources/suport/gold/mean", value = 0.5}]'],
            "gates.evaluate.metric = 'policies/ppo/sources/suport/gold/mean': no held-out prompt has this source; did you mean support?",
        ),
        (
            "tiny/full",
            ['publish.gate=[{metric = "sources.sums.gold.mean", op = ">=", value = 0.5}]'],
            "publish.gate[0].metric = 'sources/sums/gold/mean': no held-out prompt has this source; choose from support",
        ),
        (
            "tiny/full",
            [
                'evaluate.generate.agents.shop={type = "environment", environment = "shop.py:Shop", sources = ["support"]}',
                'evaluate.suites=[{name = "own", type = "instructions", prompts = {path = "own.jsonl"}}]',
            ],
            "evaluate.suites.own.generate = None: the agents of evaluate.generate play sources that the prompts of this suite lack",
        ),
        (
            "tiny/rlvr",
            ["ppo.critic=base"],
            "ppo.critic = 'base': there is no value model that could start from it; remove it",
        ),
        (
            "tiny/distill",
            ["distill.start_from=sft"],
            "distill.teacher = 'sft': the student starts from the same policy",
        ),
        (
            "tiny/full",
            ["sft.train_on=all", "sft.window_overlap=8"],
            "sft.window_overlap = 8: prepare_data.max_tokens = 192 drops documents that are longer than a window (192)",
        ),
        (
            "tiny/full",
            ["sft.window_overlap=8"],
            "sft.window_overlap = 8: windows begin inside of answers; set train_on",
        ),
        (
            "tiny/full",
            ["sft.train_on=all", "sft.window_overlap=192"],
            "sft.window_overlap = 192: must be < max_length = 192; lower it",
        ),
        (
            "tiny/distill",
            ["distill.teacher=ppo"],
            "distill.teacher = 'ppo': the profile has no [ppo]; add that section",
        ),
        (
            "tiny/full",
            ['iterative_dpo.dpo.loss={type="orpo"}', "iterative_dpo.dpo.nll_coef=0.5"],
            "iterative_dpo.dpo.nll_coef = 0.5: orpo already includes the loss of the chosen answer",
        ),
        (
            "tiny/full",
            ["iterative_dpo=none", "ppo.start_from=sft"],
            "parents.ppo = 'iterative_dpo': this profile makes no such policy",
        ),
        ("tiny/full", ["ppo.rewards.terms.7=none"], "ppo.rewards.terms.7 = 'none': there is nothing of this name"),
        (
            "tiny/online",
            ["evaluate.evaluate.best_of={online=8}"],
            "best_of.online = 'online': this profile makes no such policy",
        ),
        ("mini", ["ppo.start_from=rejection_sampling"], "ppo.start_from = 'rejection_sampling': the profile has no"),
        (
            "mini",
            ["evaluate.evaluate.reference=iterative_dpo"],
            "evaluate.evaluate.reference = 'iterative_dpo': this profile makes base, sft, ppo",
        ),
    ],
)
def test_what_a_profile_does_not_make_or_may_not_combine_is_refused(tmp_path, profile, overrides, error):
    with pytest.raises(ConfigError, match=re.escape(error)):
        load_profile(write_mini(tmp_path) if profile == "mini" else profile, overrides)


def test_an_unknown_profile_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"'tiny/ful': no such file or shipped profile; did you mean tiny/full\?"):
        find_profile("tiny/ful")
    for place in ("", ".", "/", ".."):
        with pytest.raises(ConfigError, match=rf"'{place}': no such file or shipped profile"):
            find_profile(place)
    with pytest.raises(ConfigError, match="no such file or shipped profile"):
        find_profile("x" * 5000)  # too long for the disk


def test_a_profile_of_ones_own_is_suggested_and_may_begin_with_a_mark_of_its_encoding(tmp_path, monkeypatch):
    (tmp_path / "team.toml").write_text('\ufeffextends = "tiny/full"\nname = "team"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'tem\.toml': no such file or shipped profile; did you mean team\.toml\?"):
        find_profile("tem.toml")
    assert load_profile("team.toml").name == "team"


def test_extends_merges_tables_and_replaces_the_rest(tmp_path):
    write_mini(tmp_path)
    child = tmp_path / "child.toml"
    child.write_text('extends = "mini.toml"\nname = "child"\nevaluate = "none"\n[ppo]\nsteps = 3\n')
    config = load_profile(child)
    assert (config.name, config.ppo.steps, config.ppo.prompts_per_step, config.evaluate) == ("child", 3, 4, None)


TERM = '{type = "function", function = "rlhf_core.rewards.verifiable:finished"}'
GATED = """
[[gates]]
name = "quality"
after = "sft"
otherwise = "approve"
[[gates]]
after = "ppo"
otherwise = "approve"
"""


def test_a_profile_takes_a_key_of_any_table_away(tmp_path):
    write_mini(tmp_path)
    child = tmp_path / "child.toml"
    child.write_text(
        f'extends = "mini.toml"\n[ppo.rewards.terms]\nfinished = "none"\nother = {TERM}\n'
        '[ppo.sampling]\nmax_tokens = "none"\n[ppo.advantage]\ntype = "reinforce++"\ngae_lambda = "none"\n'
    )
    config = load_profile(child)
    assert config.ppo is not None and list(config.ppo.rewards.terms) == ["other"]
    assert config.ppo.sampling.max_tokens != 8 and config.ppo.advantage.type == "reinforce++"


def test_a_profile_changes_and_takes_away_entries_of_a_list_by_their_names(tmp_path):
    write_mini(tmp_path, GATED)
    child = tmp_path / "child.toml"
    child.write_text('extends = "mini.toml"\n[gates]\nquality = "none"\nppo = {name = "last"}\n')
    assert [gate.title for gate in load_profile(child).gates] == ["last"]
    child.write_text('extends = "mini.toml"\ngates = "none"\n')
    assert load_profile(child).gates == ()
    child.write_text('extends = "mini.toml"\n[gates]\n0 = "none"\n')
    assert [gate.title for gate in load_profile(child).gates] == ["ppo"]
    child.write_text('extends = "mini.toml"\n[gates]\nqualty = "none"\n')
    with pytest.raises(
        ConfigError, match=r"^gates\.qualty = 'none': no entry of the list has this name; did you mean quality\?"
    ):
        load_profile(child)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gates.quality.otherwise=block", "gates.0.otherwise = 'block': the gate has no condition"),
        ("gates.quality.after=base", [("quality", "base"), ("", "ppo")]),
        ("gates.1.name=last", [("quality", "sft"), ("last", "ppo")]),
        ('gates.quality={after="ppo",otherwise="approve"}', [("quality", "ppo"), ("", "ppo")]),
        ("gates.quality=none", [("", "ppo")]),
        ("gates.'quality'=none", [("", "ppo")]),
        ('gates."quality=none', "--set = 'gates.\"quality': is no key: "),
        ("gates.quality.foo=none", "gates.0.foo = 'none': there is nothing of this name to remove; did you mean gates.0.op?"),
        ("gates.qualty=none", "gates.qualty = 'none': no entry of the list has this name; did you mean quality?"),
        ("gates.7.name=x", "gates.7.name = 'x': no entry of the list has this name; choose from ppo, quality"),
        ("gates.quality.aftr=ppo", "gates.0.aftr = 'ppo': unknown key; did you mean gates.0.after?"),
        ("gates.quality.aftr=none", "gates.0.aftr = 'none': there is nothing of this name to remove; did you mean gates.0.after?"),
        ("publish.gate.gold.value=1", "publish.gate.gold.value = 1: the list has no entries yet; give one with all its keys as [[publish.gate]]"),
    ],
)  # fmt: skip
def test_an_override_reaches_entries_of_a_list_by_name_or_place(tmp_path, override, expected):
    path = write_mini(tmp_path, GATED)
    if isinstance(expected, list):
        assert [(gate.name, gate.after) for gate in load_profile(path, [override]).gates] == expected
        return
    with pytest.raises(ConfigError) as refused:
        load_profile(path, [override])
    assert str(refused.value).startswith(expected)


def test_a_step_that_becomes_another_stage_has_to_give_its_inputs_again(tmp_path):
    child = tmp_path / "child.toml"
    other = 'extends = "tiny/recipe"\n[recipe.kind]\nstage = "dpo"\npolicy = "sft"\nmax_length = 64\n'
    child.write_text(f"{other}loop = {{epochs = 1}}\n")
    with pytest.raises(
        ConfigError, match=r"^recipe\.kind\.stage = 'dpo': nothing of the stage 'reward_model' .* give optimizer"
    ):
        load_profile(child)
    child.write_text(f'{other}loop = "none"\noptimizer = "none"\n')
    with pytest.raises(ConfigError, match=r"reward_models = 'kind'"):  # which is a policy now
        load_profile(child)


def test_a_profile_may_extend_a_shipped_one_from_anywhere(tmp_path):
    child = tmp_path / "mine.toml"
    child.write_text('extends = "tiny/rlvr.toml"\nname = "mine"\n[ppo]\nsteps = 3\n')
    config = load_profile(child)
    assert config.ppo and config.ppo.steps == 3 and config.ppo.samples_per_prompt == 8
    child.write_text('extends = "tiny/rlvx"\n')
    with pytest.raises(
        ConfigError,
        match=r"tiny/rlvx': there is neither such a file, relative to .*, nor a shipped profile of that name; did you mean tiny/rlvr\?",
    ):
        load_profile(child)


def test_a_circle_of_extends_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(ConfigError, match=r"a\.toml -> b\.toml -> a\.toml is a cycle"):
        load_profile(tmp_path / "a.toml")


def test_broken_toml_names_file_and_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("name = tiny\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML: .*line 1"):
        load_profile(path)


def test_a_dump_of_a_configuration_parses_to_the_same_configuration():
    config = load_profile("tiny/full")
    assert parse(config.model_dump(mode="json", exclude_none=True), origin="dump") == config
    added = with_overrides(config.model_dump(mode="json"), ["dpo.loss.type=ipo"])  # where the dump has dpo = None
    assert parse(added, origin="dump") == load_profile("tiny/full", ["dpo.loss.type=ipo"])


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b'name = "caf\xe9"', "cannot be read: 'utf-8' codec"),
        (b"seed = " + b"9" * 5000, "not valid TOML: Exceeds the limit"),
        (b"seed = " + b"[" * 5000, "not valid TOML: brackets are nested too deeply"),
        (b"extends = 5", "extends = 5: must be the name of a file; give the path of a profile"),
        (b'extends = ["tiny/full"]', r"extends = \['tiny/full'\]: must be the name of a file"),
        (b'extends = "a\\u0000b"', "must be the name of a file"),
        (b'extends = "."', "cannot be read: is a folder"),
        (b'extends = "/dev/zero"', "cannot be read: is a pipe, a device or a socket"),
        (b'extends = "pipe.toml"', "cannot be read: is a pipe"),
        (b'extends = "loop.toml"', "cannot be read: is a link to itself"),
        (b'extends = "' + b"x" * 5000 + b'"', "cannot be read: .*File name too long"),
    ],
)
def test_a_profile_that_cannot_be_read_says_why(content, rule, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(ConfigError, match=rule):
        load_profile(path)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("seed=" + "9" * 5000, r"--set seed = '9+' \.\.\.: cannot be read: Exceeds the limit"),
        ("seed=" + "[" * 5000, "cannot be read: brackets are nested too deeply"),
        ("a." * 3000 + "b=1", r"a = \{\.\.\.\}: unknown key"),
        ("name=half \ud83d", "must be valid UTF-8"),
    ],
)
def test_an_override_that_cannot_be_read_says_why(override, rule):
    with pytest.raises(ConfigError, match=rule):
        load_profile("tiny/full", [override])


def test_an_override_of_several_lines_is_text_and_changes_nothing_else():
    assert load_profile("tiny/full", ['name="one"\nseed=2']).name == '"one"\nseed=2'


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("pppo", "ppo"),
        ("ppo.kl.ceof", "ppo.kl.coef"),
        ("ppo.rewards.terms.reward_modl", "ppo.rewards.terms.reward_model"),
    ],
)
def test_a_misspelt_key_is_not_taken_away_in_silence(key, meant, tmp_path):
    error = f"{key} = 'none': there is nothing of this name to remove; did you mean {meant}[?]"
    with pytest.raises(ConfigError, match=error):
        load_profile("tiny/full", [f"{key}=none"])
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "tiny/full"\n{key} = "none"\n')
    with pytest.raises(ConfigError, match=error):
        load_profile(path)


def test_an_option_that_is_not_set_may_be_taken_away(tmp_path):
    assert load_profile("tiny/full", ["dpo=none", "ppo.correction=none"]) == load_profile("tiny/full")
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "tiny/full"\n[ppo.rewards.terms]\n"a.b" = {type = "reward_model", weight_end = "none"}\n'
    )
    more = tmp_path / "more.toml"
    more.write_text('extends = "mine.toml"\n[ppo.rewards.terms]\n"a.b" = "none"\n')
    assert load_profile(more) == load_profile("tiny/full")


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "evaluate.evaluate.parents={sftt='base'}",
            r"parents\.sftt = 'sftt': this profile makes no .*; did you mean sft",
        ),
        (
            "evaluate.evaluate.parents={sft='bse'}",
            r"parents\.sft = 'bse': this profile makes no such .*did you mean base",
        ),
        ("evaluate.evaluate.parents={sft='dpo'}", r"parents\.sft = 'dpo': this profile makes no such policy"),
        (
            "evaluate.evaluate.best_of={sftt=8}",
            r"evaluate\.evaluate\.best_of\.sftt = 'sftt': this profile makes no such",
        ),
        (
            'publish.gate=[{metric="gold/low", op=">", than="sftt"}]',
            r"publish\.gate\[0\]\.than = 'sftt': the report has no such policy; did you mean sft",
        ),
        (
            'publish.gate=[{metric="gold/low", op=">", than="champion"}]',
            "than = 'champion': the report has no such policy",
        ),
        (
            'publish.gate=[{metric="gold/lwo", op=">", value=0.0}]',
            r"publish\.gate\[0\]\.metric = 'gold/lwo': the report has no such number of a policy; did you mean gold/low",
        ),
        (
            'publish.gate=[{metric="win_rate", op=">", value=0.0}]',
            "did you mean win_rate/low|did you mean win_rate/mean",
        ),
        ('publish.gate=[{metric="gold_over_champion.low", op=">", value=0.0}]', "no such number of a policy"),
    ],
)
def test_a_policy_that_will_not_be_evaluated_is_refused_before_anything_runs(override, error):
    with pytest.raises(ConfigError, match=error):
        load_profile("tiny/full", [override])


def test_a_gate_may_compare_with_best_of_n_and_with_the_champion_that_is_challenged():
    gate = 'publish.gate=[{metric="gold/low", op=">", than="best-of-8 (sft)"}, {metric="kl/mean", op="<", than="champion"}]'
    config = load_profile("tiny/full", [gate, "publish.challenge={}"])
    assert config.publish is not None and len(config.publish.gate) == 2


@pytest.mark.parametrize("metric", ["gold", "reward_model"])
def test_a_challenge_by_what_answers_are_not_judged_by_is_refused(metric):
    taken = "evaluate.evaluate.gold=''" if metric == "gold" else "seed=17"
    changes = [taken, "publish.gate=[]", f"publish.challenge.metric={metric}"]
    if metric == "reward_model":
        assert load_profile("tiny/full", changes).publish is not None
        return
    with pytest.raises(ConfigError, match=r"publish\.challenge\.metric = 'gold': answers are not judged by it"):
        load_profile("tiny/full", changes)


@pytest.mark.parametrize(
    ("profile", "changes", "error"),
    [
        ("tiny/full", ["rejection_sampling.select.eval_fraction=0", "rejection_sampling.sft.loop.keep_best=1"],
         r"rejection_sampling\.sft\.loop\.keep_best = 1: .* raise select\.eval_fraction"),
        ("tiny/full", ["iterative_dpo.select.eval_fraction=0", "iterative_dpo.dpo.loop.keep_best=2"], "there are none"),
        ("tiny/conditional", ["conditional_sft.condition.eval_fraction=0", "conditional_sft.sft.loop.keep_best=1"], "there are none"),
        ("tiny/distill", ["distill.eval_fraction=0", "distill.loop.keep_best=1", "distill.on_policy=true", "distill.kl_weight=1"], "there are none"),
    ],
)  # fmt: skip
def test_the_best_of_no_held_out_rows_is_refused(profile, changes, error):
    with pytest.raises(ConfigError, match=error):
        load_profile(profile, changes)
    load_profile(profile, [change.replace("eval_fraction=0", "eval_fraction=0.1") for change in changes])


def test_the_parents_of_policies_that_are_taken_away_may_stay():
    assert load_profile("tiny/online", ["online.rounds=2"]).policies()[-1] == "online_2"
    config = load_profile("tiny/full", ["ppo=none", "publish=none"])
    assert "ppo" not in config.policies() and "ppo" in config.evaluate.evaluate.parents


def test_taking_away_what_an_absent_section_would_have_creates_no_section():
    assert load_profile("tiny/full", ["dpo.loss=none"]).dpo is None


def test_files_lie_beside_the_profile_and_only_then_in_the_current_folder(tmp_path, monkeypatch, caplog):
    team, elsewhere = tmp_path / "team", tmp_path / "elsewhere"
    for folder, files in ((team, ("arguments.py", "both.py")), (elsewhere, ("both.py", "here.py"))):
        folder.mkdir()
        for name in files:
            (folder / name).write_text("def f(generations):\n    return [0.0 for _ in generations]\n")
    profile = team / "own.toml"
    terms = [
        f'{one} = {{type = "function", function = "{one}.py:f"}}\n' for one in ("arguments", "both", "here", "none")
    ]
    profile.write_text(f"extends = 'tiny/full'\n[ppo.rewards.terms]\n{''.join(terms)}")

    def functions(folder: Path) -> dict[str, str]:
        monkeypatch.chdir(folder)
        rewards = load_profile(profile).ppo.rewards
        return {name: rewards.terms[name].function for name in ("arguments", "both", "here", "none")}

    written = {name: f"{name}.py:f" for name in ("arguments", "both", "here", "none")}
    assert functions(team) == written
    assert functions(tmp_path) == {name: f"team/./{path}" for name, path in written.items()}
    assert not caplog.records
    assert functions(elsewhere) == {
        name: path if name == "here" else f"{team}/./{path}" for name, path in written.items()
    }
    assert [record.getMessage() for record in caplog.records] == [
        f"here.py:f: is not in {team}, the folder of the profile; the one in {elsewhere} is used"
    ]


def test_a_key_does_not_depend_on_the_folder_in_which_a_profile_is_read(tmp_path, monkeypatch):
    team = tmp_path / "team"
    team.mkdir()
    (team / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (team / "own.toml").write_text(
        "extends = 'tiny/full'\n[prepare_data.data]\ntype = 'files'\n"
        "[[prepare_data.data.sources]]\nname = 'rows'\npath = 'rows.jsonl'\nuse = {demonstrations = 0.25, preferences = 0.25, prompts = 0.25, eval_prompts = 0.25}\n"
    )

    def key(folder: Path) -> str:
        monkeypatch.chdir(folder)
        config = load_profile(team / "own.toml")
        return stage_key(all_specs(config, lifecycle)["prepare_data"])

    assert key(team) == key(tmp_path) == key(Path("/"))
