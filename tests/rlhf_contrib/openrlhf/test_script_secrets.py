"""Keys and tokens in a script stay out of all that the importer shows, also those in parts that are not read."""

import pytest

from rlhf_contrib.openrlhf.redaction import is_secret
from rlhf_contrib.openrlhf.shell import read_commands
from rlhf_contrib.openrlhf.translate import translate
from rlhf_core.errors import ConfigError

CALL = "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d.jsonl --apply_chat_template"
KEY = "0123abcd4567"

SCRIPTS = {
    "an open branch": f"if [ -f x ]; then K={KEY}; fi\n{CALL} --use_wandb $K",
    "a value that an open branch changes": f"K=\nif [ -f x ]; then K={KEY}; fi\n{CALL} --use_wandb $K",
    "a branch that is not taken": f"if false; then K={KEY}; else K=; fi\n{CALL} --use_wandb $K",
    "a quoted value": f"if false; then K='a {KEY} b'; else K=; fi\n{CALL} --use_wandb $K",
    "an appended value": f"K=a\n[ -f x ] && K+={KEY}\n{CALL} --use_wandb $K",
    "a command": f"if false; then K=$(echo {KEY}); else K=; fi\n{CALL} --use_wandb $K",
    "a case": f"K=\ncase $1 in a) K={KEY};; *) K=x{KEY};; esac\n{CALL} --use_wandb $K",
    "a loop": f"for K in {KEY} x{KEY}; do {CALL} --use_wandb $K; done",
    "a loop that is not read": f"K=\nwhile false; do K={KEY}; done\n{CALL} --use_wandb $K",
    "a use in a branch that is not taken": f"[ -f x ] && K={KEY}\nif false; then {CALL} --use_wandb $K; fi\n{CALL} ${{K:+--seed 1}}",
    "a name of secrets": f"if false; then export WANDB_API_KEY={KEY} A=1; fi\n{CALL} ${{WANDB_API_KEY:+--seed 1}}",
    "another value": f"if false; then A=x{KEY}y; else A=1; fi\nHF_TOKEN={KEY}\n{CALL} ${{A:+--seed 1}}",
    "several variables": f"A={KEY}; B=${{A:-z}}; K=$B\nif false; then C={KEY}; fi\n{CALL} --use_wandb $K ${{C:+--seed 1}}",
    "a default": f'K="${{K:-{KEY}}}"\nif false; then C={KEY}; fi\n{CALL} --logger.wandb.key=$K ${{C:+--seed 1}}',
    "an array": f"if false; then A=(--use_wandb '{KEY}' --seed 1); fi\n{CALL} \"${{A[@]}}\"",
    "an element": f'declare -A K\n[ -f x ] && K[wandb]={KEY}\n{CALL} --use_wandb "${{K[wandb]}}"',
    "an argument": f"[ -f x ] && A={KEY}\nrun() {{ {CALL} --use_wandb $2 ${{A:+--seed 1}}; }}\nrun 1 {KEY}",
    "a login": f"wandb login {KEY}\n[ -f x ] && A={KEY}\n{CALL} ${{A:+--seed 1}}",
    "a flag on a line of its own": f"{CALL}\n  --use_wandb \\\n  '{KEY}'",
    "the form of a token": f"[ -f x ] && A=hf_{KEY * 3}\n{CALL} ${{A:+--seed 1}}",
    "the environment of a job": f'ray job submit --runtime-env-json=\'{{"env_vars": {{"WANDB_API_KEY": "{KEY}"}}}}\' -- {CALL}',
    "escaped quotes": f'ray job submit --runtime-env-json="{{\\"env_vars\\": {{\\"HF_TOKEN\\": \\"{KEY}\\"}}}}" -- {CALL}',
    "the environment of a command": f"env WANDB_API_KEY={KEY} {CALL}\n[ -f x ] && A={KEY}\n{CALL} ${{A:+--seed 1}}",
    "a flag that OpenRLHF has not": f"{CALL} --wandb_api_key {KEY}",
    "another flag": f"export HF_TOKEN={KEY}\n{CALL} --save_path out/$HF_TOKEN",
    "an error about another flag": f"HF_TOKEN={KEY}\n{CALL} --max_epochs $HF_TOKEN",
    "another flag that OpenRLHF has not": f"HF_TOKEN={KEY}\n{CALL} --note $HF_TOKEN",
}


def shown(script: str) -> str:
    try:
        return str(translate(script, name="x", template_file="x.jinja", lenient=True))
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_secret_is_in_nothing_that_is_shown(kind):
    notes = "\n".join(read_commands(SCRIPTS[kind]).notes)
    assert KEY not in shown(SCRIPTS[kind]) and KEY not in notes
    assert "***" in shown(SCRIPTS[kind]) + notes


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_value_of_the_same_place_would_be_shown_if_it_were_no_secret(kind):
    other = SCRIPTS[kind].replace("HF_TOKEN", "NAME").replace("hf_", "x").replace("WANDB_API_KEY", "NAME")
    for flag in ("--use_wandb", "--logger.wandb.key", "--wandb_api_key", "wandb login"):
        other = other.replace(flag, "--wandb_project")
    script = read_commands(other)
    assert KEY in f"{script.notes} {script.commands}" and "***" not in f"{script.notes} {script.commands}"


@pytest.mark.parametrize("value", ["0", "me", "True", "$K"])
def test_a_short_value_or_a_switch_is_hidden_in_its_flag_alone(value):
    [note, loose] = read_commands(f"if false; then A={value}; fi\n{CALL} $A\n --use_wandb {value}").notes
    assert f"A={value} (if false)" in note
    assert ("***" in loose) is (value != "$K")


@pytest.mark.parametrize("words", ["--wandb_api_key {} x", "--use_wandb {} x", "--hf_token {}"])
def test_an_error_shows_no_secret(words):
    with pytest.raises(ConfigError) as raised:
        translate(f"{CALL} {words.format(KEY)}", name="x", template_file="x.jinja")
    assert KEY not in str(raised.value)


def test_names_of_columns_are_no_secrets():
    names = "INPUT_KEY LABEL_KEY output_key PAD_TOKEN MAX_TOKENS --chosen_key --placeholder_token --wandb_project"
    assert not any(map(is_secret, names.split()))
