from __future__ import annotations

import pytest

from pipelines.importers.openrlhf.shell import read_commands
from rlhf_core.errors import ConfigError

CALL = "deepspeed --module openrlhf.cli.train_sft"


def words(script: str) -> tuple[str, ...]:
    [command] = read_commands(script)[0]
    return command.words


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{CALL} --a 1 --b=2", ("--a", "1", "--b=2")),
        (f"{CALL} --a 1 \\\n   --b 2", ("--a", "1", "--b", "2")),
        (f"{CALL} --a 1 \\  \n --b 2 \\\n\necho done", ("--a", "1", "--b", "2")),
        (f"{CALL} --a 1 \\\n  # --off 3 \\\n  --b 2 # the end", ("--a", "1", "--b", "2")),
        (f"{CALL} --a 'one two' --b \"x y\" --c a\\ b", ("--a", "one two", "--b", "x y", "--c", "a b")),
        (f"{CALL} --a $'User: {{}}\\nAssistant: '", ("--a", "User: {}\nAssistant: ")),
        (f"{CALL} --a '$HOME' --b \"\\$x\"", ("--a", "$HOME", "--b", "$x")),
        (f"{CALL} --a it#self 2>&1 | tee log.txt", ("--a", "it#self")),
        (f"{CALL} --a 1 &>> job.log &", ("--a", "1")),
        (f'M=base\nD="$M/data"\n{CALL} --m $M --d ${{D}}.jsonl', ("--m", "base", "--d", "base/data.jsonl")),
        (f'export M=base; {CALL} --m "${{M}}"', ("--m", "base")),
        (f"{CALL} --m ${{M:-other}} --n $UNKNOWN", ("--m", "other", "--n", "$UNKNOWN")),
        (f"F='--a 1 --b 2'\n{CALL} $F", ("--a", "1", "--b", "2")),
        (f"F=(--a 1 \\\n --b 'x y')\n{CALL} \"${{F[@]}}\" --c 3", ("--a", "1", "--b", "x y", "--c", "3")),
        (f"M=a\nif [ -f x ]; then\n M=b\nfi\n{CALL} --m $M", ("--m", "a")),
        (f"if true; then M=b; fi\n{CALL} --m $M", ("--m", "b")),
        (f"iter=0; iter=$((iter + 1))\n{CALL} --i $iter", ("--i", "1")),
        (
            f"N=8\n{CALL} --a $((N / 2)) --b $(( ($N + 1) * 2 )) --c $((M * 2))",
            ("--a", "4", "--b", "18", "--c", "$((M * 2))"),
        ),
        (f"D=$(cd .. && pwd)\n{CALL} --d $D/x", ("--d", "$(cd .. && pwd)/x")),
    ],
)
def test_words_are_those_that_the_shell_would_pass(script: str, expected: tuple[str, ...]) -> None:
    assert words(script) == expected


def test_a_heredoc_fills_a_variable_that_is_the_command() -> None:
    script = "M=base\nread -r -d '' job <<EOF\nopenrlhf.cli.train_sft \\\n  --m $M\n  --n 2\nEOF\n  # note\ndeepspeed --module $job"
    assert words(script) == ("--m", "base", "--n", "2")


def test_what_is_printed_is_not_run() -> None:
    commands, variables = read_commands(f'N=5\njob="openrlhf.cli.train_sft --a 1"\necho $job\npython -m $job\n# {CALL}')
    assert [command.words for command in commands] == [("--a", "1")]
    assert variables["N"] == "5"


def test_a_script_inside_a_shell_inside_a_launcher_is_read() -> None:
    script = (
        'srun --overlap bash -c \\\n"pip install x \\\n&& ray job submit --runtime-env-json=\'{\\"a\\": \\"b\\"}\' '
        '-- python3 -m openrlhf.cli.train_ppo_ray \\\n --a 1" &>> log'
    )
    [command] = read_commands(script)[0]
    assert (command.module, command.words) == ("train_ppo_ray", ("--a", "1"))
    assert '--runtime-env-json={"a": "b"}' in command.launcher


def test_a_path_to_the_file_is_the_module_too() -> None:
    [command] = read_commands("torchrun --nproc_per_node 2 /x/openrlhf/cli/train_dpo.py --a 1")[0]
    assert (command.module, command.launcher[0]) == ("train_dpo", "torchrun")


@pytest.mark.parametrize(
    "script", [f"{CALL} --a 'open", f'{CALL} --a "open', f"{CALL} --a $(open", f"{CALL} --a ${{open"]
)
def test_what_is_not_closed_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="is not closed"):
        read_commands(script)


def test_a_nul_character_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a NUL character, which no shell can read"):
        read_commands(f"{CALL} --a \0 1")


def test_a_heredoc_inside_quotes_fills_its_variable() -> None:
    assert words(f"bash -c '\nread X <<EOF\n--a 1\nEOF\n{CALL} $X\n'") == ("--a", "1")
