import re
import subprocess

import pytest

from rlhf_contrib.openrlhf.shell import read_commands
from rlhf_core.errors import ConfigError

CALL = "deepspeed --module openrlhf.cli.train_sft"


def words(script: str) -> tuple[str, ...]:
    [command] = read_commands(script)[0]
    return command.words


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"command -v ray && command {CALL} --a 1", ("--a", "1")),
        (f"{CALL} --a 1 \\  \n --b 2 \\\n\necho done", ("--a", "1", "--b", "2")),
        (f"{CALL} --a 1 \\\n  # --off 3 \\\n  --b 2 # the end", ("--a", "1", "--b", "2")),
        (f"{CALL} --a it#self 2>&1 | tee log.txt", ("--a", "it#self")),
        (f"{CALL} --a 1 &>> job.log &", ("--a", "1")),
        (f"{CALL} --m ${{M:-other}} --n $UNKNOWN", ("--m", "other", "--n", "$UNKNOWN")),
        (
            f"N=8\n{CALL} --a $((N / 2)) --b $(( ($N + 1) * 2 )) --c $((M * 2))",
            ("--a", "4", "--b", "18", "--c", "$((M * 2))"),
        ),
        (f"D=$(cd .. && pwd)\n{CALL} --d $D/x", ("--d", "$(cd .. && pwd)/x")),
    ],
)
def test_words_are_those_that_the_shell_would_pass(script, expected):
    assert words(script) == expected


BASH = [
    f"{CALL} --a 1 --b=2",
    f"{CALL} --a 1 \\\n   --b 2",
    f"{CALL} --a 'one two' --b \"x y\" --c a\\ b",
    f"{CALL} --a $'User: {{}}\\nAssistant: '",
    f"{CALL} --a '$HOME' --b \"\\$x\"",
    f'M=base\nD="$M/data"\n{CALL} --m $M --d ${{D}}.jsonl',
    f'export M=base; {CALL} --m "${{M}}"',
    f"F='--a 1 --b 2'\n{CALL} $F",
    f"F=(--a 1 \\\n --b 'x y')\n{CALL} \"${{F[@]}}\" --c 3",
    f"M=a\nif [ -f x ]; then\n M=b\nfi\n{CALL} --m $M",
    f"if true; then M=b; fi\n{CALL} --m $M",
    f"iter=0; iter=$((iter + 1))\n{CALL} --i $iter",
    f'A="--a 1"; A+=" --b 2"; A="$A --c 3"\n{CALL} $A',
    f'A=(--a 1)\nA+=(--b "x y")\n{CALL} "${{A[@]}}"',
    f'A=(\n  --a 1 # one\n  --b it#self\n\n  --c "x # y"\n)\n{CALL} "${{A[@]}}"',
    f'A=(--a 1 --b 2)\n{CALL} ${{A[*]}} --n ${{#A[@]}} --first ${{A[0]}} --third "${{A[2]}}"',
    f'D=${{2:-"a b"}}; E=${{3:-\'c d\'}}; F="${{4:-e f}}"\n{CALL} --d "$D" --e "$E" --f "$F"',
    f'{CALL} --d "${{2:-"a b"}}" --e ${{3:-"c d"}} --f ${{4:-g}}',
    f'A=${{X:-${{Y:-z}}}}; B="${{P:-${{Q:-a b}}/c}}"\n{CALL} --a $A --b "$B"',
    'read -r -d "" J <<EOF\nopenrlhf.cli.train_sft \\\n --a 1 \\\n --b $(echo x) --c y\nEOF\ndeepspeed --module $J',
    'J=$(cat <<EOF\nopenrlhf.cli.train_sft --a 1\n --b "q" (1\nEOF\n)\ndeepspeed --module $J',
    "J=$(cat <<'EOF'\nopenrlhf.cli.train_sft --a 1\n --b it's\nEOF\n)\ndeepspeed --module $J",
    f"bash <<EOF\n{CALL} --a 1 \\\n --b 2\nEOF",
    f"bash -c '\nM=2\n{CALL} --a 1 \\\n  --b $M\n'",
    f'CMD="{CALL} --a \'x y\'"\neval "$CMD --b 2"',
    f'CMD=({CALL} --a "1 2")\n"${{CMD[@]}}" --b 2',
    'run() { deepspeed --module openrlhf.cli.$1 --a $2 "${@:3}"; }\nrun train_sft 1 --b "x y"',
    f'function run {{\n local lr=$1; shift\n {CALL} --lr $lr "$@"\n}}\nrun 1e-6 --b 2',
    f'try() {{ "$@" || exit 1; }}\ntry {CALL} --a 1',
    f'set -euo pipefail\nset -- --a 1 --b "x y"\n{CALL} "$@"',
    f"MODE=grpo\ncase $MODE in\n ppo) E=gae;;\n grpo|dr) E=group_norm ;;\n *) E=none;;\nesac\n{CALL} --e $E",
    f'MODE=${{1:-grpo}}\ncase "$MODE" in (ppo) E=gae;; (gr*) E=group_norm;; esac\n{CALL} --e $E',
    f'N=70b\nif [[ $N == 7b ]]; then L=1; elif [[ "$N" == 70* && -n "$N" ]]; then L=2; else L=3; fi\n{CALL} --l $L',
    f"N=4; if (( N > 8 )); then B=1; else B=2; fi; (( N *= 2 )); (( N++ ))\n{CALL} --b $B --n $N",
    f'for x in 1 2 3; do A+=" --x$x $x"; done\n{CALL} $A',
    f'[ "a" = a ] && A="--a 1"\n[ b = a ] && A+=" --b 2"\n[ b = a ] || A+=" --c 3"\n{CALL} $A',
    f': ${{LR:=3e-4}}\n: "${{B:=8}}"\n{CALL} --lr $LR --b $B',
    f"M=a/b-7b.tar\n{CALL} --a ${{M##*/}} --b ${{M%.tar}} --c ${{M#*/}} --d ${{M/b/c}} --e ${{M//b/c}} --f ${{M%%-*}}",
    f'A=(lr b); M=x/y; {CALL} "${{A[@]/#/--}}" ${{M/%y/z}} ${{M/#y/z}} ${{M//x/}}',
    f'declare -A C=([lr]=1e-6 [b]=8)\nC[x]=2\n{CALL} --lr ${{C[lr]}} --b "${{C[b]}}" --x ${{C[x]}}',
    f'export "A=x y" B=2; [[ -f x ]] || (A=3); {CALL} --a "$A" --b $B',
    f"( A=1; {CALL} --a $A )\n{{ B=2; {CALL} --b $B; }} 2>&1 | cat",
    f"{CALL} --a \"x\\\ny\" --b 'p\\\nq' --c d\\\ne",
    f'A=" --a 1 "; {CALL} x$A"y"',
    f'A=; {CALL} --a "$A" --b ${{A:-d}} --c ${{A-e}} --d ${{A:+f}}',
    f"cat > /dev/null <<EOF\nnothing it's \"x\nEOF\n{CALL} --a 1",
    f'mapfile -t A <<EOF\n--a\n1 2\nEOF\n{CALL} "${{A[@]}}"; IFS= read -r X <<< "a b"\n{CALL} --x "$X"',
    f"while [[ $# -gt 0 ]]; do case $1 in --lr) L=$2; shift 2;; esac; done\n{CALL} --lr ${{L:-5}}",
    f'LR=5; while getopts "l:" o; do case $o in l) LR=$OPTARG;; esac; done\n{CALL} --lr $LR',
    f'A=5; {CALL} ${{A:+--x $A}} ${{A:+"--y" "a $A"}} ${{B:---c 1}} "${{A:+one word}}"',
    f"X=p/q; {CALL} --a ${{X//\\//_}} --b ${{X/p\\/q/r}}",
    f"{CALL} --a 1 \\\n  `# a comment` \\\n  --b 2",
    f"f() {{ local A=1 B; declare C=2; B=3; D=4; }}; A=9 B=8 C=7; f; {CALL} $A $B $C $D",
    f": <<'END'\n{CALL} --off\nEND\n{CALL} --a 1",
    f"A=5; let A+=2 B=A*2; {CALL} --a $A --b $B",
    f'read -r A B <<< "1 2 3"; {CALL} --a "$A" --b "$B"; read -ra C <<< "x y"; {CALL} --c "${{C[1]}}"',
    f'declare -A M=([a]=1); M[a]+=2; {CALL} --n ${{#M[@]}} "${{M[@]}}"; A=(x y); A[1]=z; A[2]=w; {CALL} "${{A[@]}}"',
    f"test 1 -lt 2 && {{ X=1; }} || {{ X=2; }}\n{CALL} --x $X",
    f"env Q=1 true; Z=1 {CALL} --a 1 > /dev/null 2>&1; time {CALL} --b 1; ! {CALL} --c 2",
]


@pytest.mark.parametrize("script", BASH)
def test_words_are_those_that_bash_passes(script, tmp_path):
    seen = tmp_path / "seen"
    stub = f"deepspeed() {{ printf '%s\\0' CALL \"$@\" >> {seen}; }}\nexport -f deepspeed\n"
    subprocess.run(["bash", "-c", stub + script], env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL, check=False)
    passed = [tuple(call.split("\0")[1:-1]) for call in seen.read_text().split("CALL")[1:]]
    read = [("--module", f"openrlhf.cli.{one.module}", *one.words) for one in read_commands(script).commands]
    assert read == passed


BRACES = r"""
{a,b}.jsonl {1..3} x{1..3}y {a,b}{c,d} {a,{b,c}} a{b{c,d},e}f {a} {} {,} x{,} x{,a}y {a,b {a,b}} {{a,b},c}
'{a,b}' "{a,b}" {'a,b',c} {"a b",c} {a\,b,c} \{a,b} {a,b\} {a,b}'{c,d}' {"{a,b}",c} {a,b}$'\t'{c,d} {a,b}"{c,d}"{e,f}
{1..10..3} {10..1..3} {01..03} {-1..1} {3..1} {a..e} {e..a..2} {A..C} {a..3} {1..b} {1..3..0} {1...3} {1..} {-01..1} {00..2}
{1..03} {08..11} {1..2..x} {1..2}..3} {a..c..2}x {2..1}{1..2} {5..5} {{1..3}} {{1..2},x} {a..c,d} {1..3}.{x,y}
a,b {a,b},c x{1..2}{a} {a}{1..2} {a,b{c} {a,,b} {{},a} {a,{}} {}{a,b} {a,b}{} {,a}{,b} {{{a}}} {a,b}} --a={1,2}
${X-{a,b}} ${X-a,b} {${X-a},b} ${X-a}{b,c} "${X-{a,b}}"{c,d} $(echo {a,b}) {$(echo a,b),c} {`echo a`,b} a{b,c}$((1+2)) {a,b}=c
"""


def test_braces_make_the_words_that_they_make_in_bash():
    table = re.findall(r"(?:\$\([^)]*\)+|`[^`]*`|\"[^\"]*\"|\S)+", BRACES)
    script = "p() { for w; do printf '%s\\0' \"$w\"; done; printf '\\1'; }\n" + "\n".join(f"p {word}" for word in table)
    run = subprocess.run(["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True)
    expected = [tuple(one.split("\0")[:-1]) for one in run.stdout.decode().split("\1")[:-1]]
    assert len(table) == 75 and dict(zip(table, [words(f"{CALL} {word}") for word in table], strict=True)) == dict(
        zip(table, expected, strict=True)
    )


def test_braces_are_characters_where_bash_does_not_expand_them(tmp_path):
    script = f'A={{a,b}}; B="{{a,b}}"; C=${{C:-{{c,}}}}\nD=({{a,b}}.x {{1..2}})\n{CALL} $A $B "$C" "${{D[@]}}" {{$A,c}}'
    assert words(script) == ("{a,b}", "{a,b}", "{c,}", "a.x", "b.x", "1", "2", "{a,b}", "c")


@pytest.mark.parametrize(
    ("script", "expected", "note"),
    [
        (f"{CALL} --a 1\n  --b 2", ("--a", "1", "--b", "2"), "line 2: --b 2 is a line of its own"),
        (f"{CALL} --a 1 \\\n # --off \\\n --b 2", ("--a", "1", "--b", "2"), "line 3: --b 2 is a line of its own"),
        (f"{CALL} --a 1 \\ \n --b 2", ("--a", "1", "--b", "2"), "line 2: --b 2 is a line of its own"),
        (f"{CALL} --a 1 \\ # x\n --b 2", ("--a", "1", "--b", "2"), "line 2: --b 2 is a line of its own"),
        ("deepspeed\n --module openrlhf.cli.train_sft --a 1", ("--a", "1"), "line 2: --module openrlhf.cli.train_sft"),
        (f"{CALL} --a 1\n$REST", ("--a", "1"), "line 2: $REST begins a line and has no value"),
        (f"A=1\nif [ -f x ]; then A+=2; fi\n{CALL} --a $A", ("--a", "1"), "line 2: A+=2 (if [ -f x ]) is not read"),
        (f"if $X; then A=1; else A=2; fi\n{CALL} --a $A", ("--a", "1"), "line 1: A=2 (else) is not read"),
        (f"A=1\ncase $1 in x) A=3;; esac\n{CALL} --a $A", ("--a", "1"), "line 2: A=3 (case $1 in x) is not read"),
        (f"A=1\ngrep -q x y && A=2\n{CALL} --a $A", ("--a", "1"), "line 2: A=2 (after &&) is not read"),
        (f"if false; then A=1; else A=2; fi\n{CALL} --a $A", ("--a", "2"), "line 1: A=1 (if false) is not read"),
        (
            f"for a in 1 2; do\n{CALL} --a $a; done",
            ("--a", "1"),
            "the commands of for a are read with 1 alone, not with 2",
        ),
        (f"for i in {{1..3}}; do {CALL} --a $i; done", ("--a", "1"), "read with 1 alone, not with 2, 3"),
        (f"for d in {{a,b}}.jsonl; do {CALL} --a $d; done", ("--a", "a.jsonl"), "with a.jsonl alone, not with b.jsonl"),
        (f"for i in {{c..a}}; do {CALL} --a $i; done", ("--a", "c"), "read with c alone, not with b, a"),
        (f"while true; do {CALL} --a 1; done", ("--a", "1"), "the commands of while true are read once"),
        (
            f"[ -f x ] && A=--b\n{CALL} --a 1 $A",
            ("--a", "1", "--b"),
            "line 1: A=--b (after &&) is read: the script leaves",
        ),
        (f"if [ -f x ]; then A=1; fi\n{CALL} --a ${{A:-2}}", ("--a", "1"), "line 1: A=1 (if [ -f x ]) is read"),
        (f"IFS=,\n{CALL} --a 1", ("--a", "1"), "line 1: IFS is not read"),
        (f"X=$({CALL} --b 2)\n{CALL} --a 1", ("--a", "1"), "line 1: $(" + CALL + " --b 2) is not read"),
        (f"source env.sh\n{CALL} --a $A", ("--a", "$A"), "line 1: source env.sh is not read"),
        (f'A="$@"\nB=1\n{CALL} --a 1 $A', ("--a", "1"), "line 1: $@ stands for the arguments of the script"),
        (f'{CALL} --a 1 "$@"', ("--a", "1"), "line 1: $@ stands for the arguments of the script"),
        (f"{CALL} --a 1 ${{W:+--b $W}}", ("--a", "1"), "${W:+--b $W} is read as empty: the script sets no W"),
        (f"go() {{ {CALL} --a 1; }}\n$1", ("--a", "1"), "line 1: function go is not called; its commands are read"),
        (f"cat > x.sh <<EOF\n{CALL} --a 1\nEOF\nsbatch x.sh", ("--a", "1"), "goes to a file; its commands are read"),
        (f"{CALL} --a 1\nX='python -m openrlhf.cli.train_rm'", ("--a", "1"), "openrlhf.cli.train_rm is named, but no"),
        (f"{CALL} --r x_$(date +%m %d) --a 1", ("--r", "x_$(date +%m %d)", "--a", "1"), ""),
    ],
)
def test_what_is_read_in_another_way_than_a_shell_would_is_named(script, expected, note):
    read = read_commands(script)
    assert [command.words for command in read.commands] == [expected]
    assert note in "\n".join(read.notes) and len(read.notes) <= 1 and bool(read.notes) == bool(note)


def test_the_commands_of_branches_that_the_script_does_not_choose_are_all_read():
    read = read_commands(f"if [ $1 = a ]; then {CALL} --a 1; else {CALL} --a 2; fi")
    assert [command.words for command in read.commands] == [("--a", "1"), ("--a", "2")]
    assert read.notes == ["line 1: of the branches of `if` a shell runs one; the commands of all are read"]


def test_what_is_printed_is_not_run():
    commands, variables, *_ = read_commands(
        f'N=5\njob="openrlhf.cli.train_sft --a 1"\necho $job\npython -m $job\n# {CALL}'
    )
    assert [command.words for command in commands] == [("--a", "1")]
    assert variables["N"] == "5"


def test_a_script_inside_a_shell_inside_a_launcher_is_read():
    script = (
        'srun --overlap bash -c \\\n"pip install x \\\n&& ray job submit --runtime-env-json=\'{\\"a\\": \\"b\\"}\' '
        '-- python3 -m openrlhf.cli.train_ppo_ray \\\n --a 1" &>> log'
    )
    [command] = read_commands(script)[0]
    assert (command.module, command.words) == ("train_ppo_ray", ("--a", "1"))
    assert '--runtime-env-json={"a": "b"}' in command.launcher


def test_a_path_to_the_file_is_the_module_too():
    [command] = read_commands("torchrun --nproc_per_node 2 /x/openrlhf/cli/train_dpo.py --a 1")[0]
    assert (command.module, command.launcher[0]) == ("train_dpo", "torchrun")


@pytest.mark.parametrize(
    "script", [f"{CALL} --a 'open", f'{CALL} --a "open', f"{CALL} --a $(open", f"{CALL} --a ${{open"]
)
def test_what_is_not_closed_is_refused(script):
    with pytest.raises(ConfigError, match="is not closed"):
        read_commands(script)


def test_a_nul_character_is_refused():
    with pytest.raises(ConfigError, match="has a NUL character, which no shell can read"):
        read_commands(f"{CALL} --a \0 1")


def test_a_heredoc_inside_quotes_fills_its_variable():
    assert words(f"bash -c '\nread X <<EOF\n--a 1\nEOF\n{CALL} $X\n'") == ("--a", "1")


def test_an_expression_that_is_too_deep_has_no_value():
    assert words(f"N=$(({'-' * 20_000}1))\n{CALL} --a 1") == ("--a", "1")


@pytest.mark.parametrize("pattern", ["data/*.jsonl", "{a..$N}", "part-?.jsonl", "part-[0-9].jsonl"])
def test_a_loop_over_a_pattern_is_announced(pattern):
    script = read_commands(f"for d in {pattern}; do {CALL} --dataset $d; done")
    assert len(script.commands) == 1 and [note for note in script.notes if pattern in note]
