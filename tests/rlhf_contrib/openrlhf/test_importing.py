import io
import tomllib
from pathlib import Path

import pytest
from jinja2 import Environment
from rich.console import Console

from pipelines.cli.main import main
from pipelines.flows.profile import load_profile
from rlhf_contrib.openrlhf.translate import import_script, translate
from rlhf_core.errors import ConfigError

SFT = "deepspeed --num_gpus 2 --module openrlhf.cli.train_sft --pretrain models/base --dataset d.jsonl --output_key a"
PPO = "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p.jsonl --apply_chat_template"


def test_a_profile_is_written_and_every_flag_is_shown(tmp_path, capsys):
    script, out = tmp_path / "train.sh", tmp_path / "mine.toml"
    script.write_text(f"{SFT} --apply_chat_template --learning_rate 3e-6 --use_wandb me --bf16 --flash_attn --zpg 8")
    assert main(["import-openrlhf", str(script), "--out", str(out)]) == 0
    config = load_profile(out)
    assert config.name == "mine" and config.sft and config.sft.optimizer.learning_rate == 3e-6
    assert "learning_rate = 3e-06  # --learning_rate 3e-6" in out.read_text()
    assert "warmup_fraction = 0.03  # default of --lr_warmup_ratio" in out.read_text()
    shown = capsys.readouterr().out
    for text in (
        "Translated (",
        "Does not matter here (",
        "Not translatable (1)",
        "--use_wandb ***",
        "--zpg 8",
        "to do: ",
    ):
        assert text in shown
    assert not (tmp_path / "mine.jinja").exists()


def test_without_a_file_the_profile_alone_goes_to_standard_output(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(SFT))
    assert main(["import-openrlhf", "-"]) == 0
    captured = capsys.readouterr()
    assert tomllib.loads(captured.out)["prepare_data"]["chat_template"] == "openrlhf.jinja"
    assert "Translated (" in captured.err and "write this into openrlhf.jinja" in captured.err


def test_text_without_a_chat_template_gets_one_that_writes_the_same(tmp_path):
    script, out = tmp_path / "train.sh", tmp_path / "mine.toml"
    script.write_text(SFT + " --input_template $'Q: {}\\nA: '")
    assert main(["import-openrlhf", str(script), "--out", str(out)]) == 0
    assert load_profile(out).prepare_data.chat_template == str(tmp_path / "mine.jinja")
    template = Environment().from_string((tmp_path / "mine.jinja").read_text())
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert template.render(messages=turns, eos_token="</s>") == "Q: 2+2?\nA: 4</s>"


def test_openrlhfs_own_template_is_the_default_of_sft_alone():
    dpo = "deepspeed --module openrlhf.cli.train_dpo --pretrain m --dataset d.jsonl"
    templates = [translate(text, name="x", template_file="x.jinja").template for text in (SFT, dpo)]
    turns = [{"role": "user", "content": "Hi"}]
    rendered = [Environment().from_string(one).render(messages=turns, eos_token="") for one in templates]
    assert rendered == ["User: Hi\nAssistant: ", "Hi"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            f"{SFT} --learning_rat 1",
            "--learning_rat = '1': OpenRLHF's train_sft has no such flag; did you mean --learning_rate?",
        ),
        (
            f"{SFT} --beta 0.1",
            "--beta = '0.1': OpenRLHF's train_sft has no such flag; it is one of train_dpo, train_kto",
        ),
        (f"{SFT} --xyzzy", "--xyzzy = '': OpenRLHF's train_sft has no such flag; remove it, or --lenient\n"),
        (f"{SFT} --bf16 true", "--bf16 = 'true': is a switch"),
        (f"{SFT} --seed 1 2", "--seed = '1 2': takes one value"),
        (f"{SFT} --seed", "--seed = '': needs a value"),
        (f"{SFT} --max_epochs two", "--max_epochs = 'two': must be a number"),
        (f"{SFT} --max_epochs $N", "--max_epochs = '$N': must be a number; assign the variable"),
        (f"{SFT} --zero_stage 4", "--zero_stage 4: runtime.trainer.zero_stage = 4: must be 0, 1, 2 or 3; change it in"),
        (
            f"{SFT} --learning_rate -1",
            "--learning_rate -1: sft.optimizer.learning_rate = -1.0: must be greater than 0;",
        ),
        (
            f"{SFT} --max_len 4",
            "--max_len 4; an answer of a token or more has to fit: prepare_data.max_prompt_tokens = 3:",
        ),
        (f"{PPO} --train_batch_size 0", "--train_batch_size = '0': must be at least 1; change it\n"),
        (f"{SFT} --adam_betas 0.9", "--adam_betas = '0.9': takes two numbers"),
        (f"{SFT} --dataset_probs a,b", "--dataset_probs = 'a,b': must be a number"),
        (SFT.replace("--dataset d.jsonl", ""), "--dataset = '': train_sft needs it"),
        (SFT.replace("--pretrain models/base", ""), "--pretrain = '': train_sft needs it"),
        ("ls", "script: no call of openrlhf.cli was found; known are"),
        ("[ -f x ] && A=1\necho $A\nls $A", "script: no call of openrlhf.cli was found; known are"),
        (". ./x.sh\n$JOB", "script: line 1: . ./x.sh is not read; what it sets has no value here; known are"),
        (
            "X='-m openrlhf.cli.train_rm'",
            "script: openrlhf.cli.train_rm is named, but no command of it was found; give",
        ),
        ("python -m openrlhf.cli.train_kd --kd_coef 0.4", "--teacher_model = '': train_kd needs it"),
        ("python -m openrlhf.cli.interactive_chat", "script: interactive_chat is not read: `rlhf chat` talks to"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(script, message, tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text(script)
    assert main(["import-openrlhf", str(path), "--out", str(tmp_path / "out.toml")]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "out.toml").exists()


def test_a_script_that_needs_no_profile_writes_none(tmp_path, capsys):
    script, out = tmp_path / "serve.sh", tmp_path / "out.toml"
    script.write_text("python -m openrlhf.cli.serve_rm --reward_pretrain models/rm")
    assert main(["import-openrlhf", str(script), "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rlhf serve-reward --reward-model models/rm --port 5000" in said and "no profile is needed" in said
    assert not out.exists()


def test_a_lenient_reader_lists_unknown_flags(tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text(f"{SFT} --my_own 1 2 --seed 3")
    assert main(["import-openrlhf", str(path), "--out", str(tmp_path / "out.toml"), "--lenient"]) == 0
    assert load_profile(tmp_path / "out.toml").seed == 3
    assert "--my_own 1 2" in capsys.readouterr().out


def test_two_commands_of_one_section_are_named_since_their_settings_are_mixed():
    rm, dpo = (SFT.replace("train_sft", one).replace("--output_key a", "") for one in ("train_rm", "train_dpo"))
    for second, noted in ((SFT, True), (rm, False), (dpo, False)):
        notes = translate(f"{SFT}\n{second}", name="x", template_file="x.jinja").notes
        assert any("both make [sft], whose rows" in note for note in notes) is noted


def test_a_flag_that_is_given_twice_counts_the_second_time():
    translation = translate(f"{SFT} --seed 1 --seed 2", name="x", template_file="x.jinja")
    assert "seed = 2" in translation.profile
    assert sorted((one.text, one.fate) for one in translation.outcomes if one.flag == "--seed") == [
        ("1", "ignored"),
        ("2", "translated"),
    ]


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "train.sh").write_text(SFT)
    (tmp_path / "out.toml").write_text("mine")
    assert main(["import-openrlhf", str(tmp_path / "train.sh"), "--out", str(tmp_path / "out.toml")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "out.toml").read_text() == "mine"


def test_the_example_of_the_documents_gives_what_they_say():
    page = (Path(__file__).resolve().parents[3] / "rlhf_contrib/openrlhf/README.md").read_text()
    script, _, rest = page.partition("```text\n")[2].partition("```")
    shown = rest.partition("```toml\n")[2].partition("```")[0]
    profile = translate(script, name="x", template_file="x.jinja").profile
    assert set(shown.splitlines()) <= set(profile.splitlines())


def test_a_script_that_is_not_utf8_is_refused(tmp_path):
    script = tmp_path / "train.sh"
    script.write_bytes(b"echo caf\xe9")
    with pytest.raises(ConfigError, match=r"train\.sh.*cannot be read .*give a text in UTF-8"):
        import_script(str(script), out="", lenient=False, console=Console())
    with pytest.raises(ConfigError, match=r"cannot be read .*File name too long"):
        import_script("x" * 5000, out="", lenient=False, console=Console())


def test_control_characters_of_a_script_stay_out_of_the_profile():
    script = SFT.replace("d.jsonl", "d\x1b\x7f.jsonl") + " --apply_chat_template"
    made = translate(script, name="x", template_file="x")
    [source] = tomllib.loads(made.profile)["prepare_data"]["data"]["sources"]
    assert source["path"] == "d\x1b\x7f.jsonl"
    assert not {"\x1b", "\x7f"} & set(made.profile)
