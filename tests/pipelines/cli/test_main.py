import errno
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.cli import main as main_module
from pipelines.cli.completion import _commands
from pipelines.cli.main import VERBS, _parser, main
from pipelines.execution.plan import PlannedStage
from pipelines.flows.profile import load_profile
from rlhf_core.errors import ArtifactError
from rlhf_core.stage.decision import Decision, decide
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import disk_full, remove_tree
from rlhf_core.types import PolicyRef
from tests.support.small_pipeline import two_toys, write_mini
from tests.support.toy_stage import NoEngines, RecordingTracker, ToyConfig, toy_spec

HEAVY = ("torch", "transformers", "vllm", "ray", "deepspeed", "prefect", "mlflow")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    return tmp_path


def cli(home: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli.main", *arguments],
        env=os.environ | {"RLHF_HOME": str(home), "OMP_NUM_THREADS": "1"} | changes,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


FULL = "standard output: No space left on device; write to another place, and run the command again\n"


@pytest.mark.parametrize(
    ("to", "status", "error"), [("| true", 141, ""), ("> /dev/full", 74, FULL), (">&- <&-", 0, "")]
)
def test_output_that_is_not_read_or_cannot_be_written_ends_the_command_as_other_tools(tmp_path, to, status, error):
    for words in (["profiles"], ["plan", "tiny/full"], ["completion", "bash"], ["--version"]):
        command = f"{sys.executable} -m pipelines.cli.main {' '.join(words)} {to}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=os.environ | {"RLHF_HOME": str(tmp_path)}
        )
        assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (disk_full(Path("/data/store")), "store = '/data/store': the disk is full; free space"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/run.log"),
            "/data/run.log: No space left on device; free",
        ),
    ],
)
def test_a_full_disk_is_one_line_and_a_status_of_its_own(monkeypatch, capfd, error, said):
    def fails(options: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "_verb", lambda options: fails)
    assert main(["profiles"]) == 74
    written = capfd.readouterr().err
    assert written.startswith(said) and written.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["plan", "tiny/full", "--set", "ppo.kl_coeff=1"],
            "ppo.kl_coeff = 1: unknown key; did you mean ppo.kl.coef?\n",
        ),
        (["plan", "tiny/nothing_like_it_at_all"], "profile = 'tiny/nothing_like_it_at_all': no such file"),
        (["explain", "sfft"], "explain = 'sfft': no such stage; this pipeline has prepare_data, sft"),
        (
            ["explain", "tiny/full"],
            "explain = 'tiny/full': is a profile; name a stage: rlhf explain STAGE --profile tiny/full\n",
        ),
        (
            ["chat", "ppo", "--once", "hello"],
            "policy = 'ppo': is neither label nor digest of a policy, nor the path of a folder",
        ),
        (["resume", "xyz"], "resume = 'xyz': no run was started yet in "),
        (["sweep", "tiny/full", "--random", "3"], "--random = 3: there is no key to draw; add --range KEY=LOW..HIGH"),
        (["store", "gc", "--keep-days", "nan"], "keep_days = nan: must be 0 or more; "),
        (
            ["store", "push", "sft", "b", "--store", "away"],
            f"store = '{Path.cwd() / 'away'}': does not exist; name a store",
        ),
        (
            ["store", "ls", "--store", f"{__file__}/x"],
            f"store = '{__file__}/x': cannot be a folder ({__file__} is no folder); ",
        ),
        (["store", "share", "--group", "nobody's"], 'group = "nobody\'s": there is no such group; '),
        (["worker", "--pool", "gpus", "--runs-at-once", "0"], "--runs-at-once = 0: must be >= 1; "),
        (["diff", "a", "b"], "diff = 'a': is no profile, no label or digest of an artifact, no folder"),
    ],
)
def test_what_is_refused_takes_one_line_and_status_2(here, capsys, arguments, line):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(line) and error.count("\n") == 1
    assert not (here / "home" / "store").exists(), "nothing was done"


def test_plan_prints_a_line_per_stage(here, capsys):
    assert main(["plan", str(write_mini(here)), "--until", "sft"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["RUN", "prepare_data"], ["RUN", "sft"]]
    assert last == "0 hits, 2 to run, no estimate: the store has no earlier result of them"


@pytest.mark.parametrize(("engine", "noted"), [("deepspeed", True), ("torch", False)])
def test_the_plan_notes_adapters_that_are_merged_into_bfloat16(engine, noted, here, capsys):
    settings = ["sft.lora={rank = 8}", "runtime.trainer.dtype=bfloat16", f"runtime.trainer.engine={engine}"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", str(write_mini(here)), "--until", "sft", *overrides]) == 0
    assert ("sft: adapters are merged into bfloat16 weights" in capsys.readouterr().out) is noted


def test_explain_prints_the_whole_key_where_all_of_it_is_wanted(here, capsys):
    profile, said = str(write_mini(here)), {}
    for option in ((), ("--all",), ("--json",)):
        assert main(["explain", "prepare_data", "--profile", profile, *option]) == 0
        said[option] = capsys.readouterr().out
    lines = said[()].splitlines()
    assert lines[0] == "prepare_data: RUN: first run" and len(lines) <= 15
    assert lines[-1] == f"next: rlhf run {profile} --until prepare_data"
    assert '"stage": "prepare_data"' in said["--all",] and '"seed": 17' in said["--all",]
    found = json.loads(said["--json",])
    assert (found["decision"], found["payload"]["seed"], found["record"]) == ("RUN", 17, None)
    assert found["next"] == lines[-1].removeprefix("next: ")


@pytest.mark.parametrize(
    ("state", "stage", "said", "command"),
    [
        ("made", "first", r"first: HIT: made .*\n(.*\n)*artifact: \w{12}, .* in 1 attempt\n", "chat"),
        ("made", "second", r"second: RUN: first run\n", "run"),
        (
            "failed",
            "second",
            r"second: RESUME: from step 1 of attempt 1\n(.*\n)*attempts: 1, .*: step 2 went wrong\n",
            "run",
        ),
        ("damaged", "first", r"first: RUN: its artifact cannot be used: .*total.txt has 0 bytes.*\n", "run"),
    ],
)
def test_explain_ends_with_the_next_command(
    here, capsys, monkeypatch, *,
    state, stage, said, command,
):  # fmt: skip
    monkeypatch.setattr("pipelines.cli.plan_verbs.lifecycle", two_toys)
    profile, store = str(write_mini(here)), ArtifactStore(here / "home" / "store")
    made = {"runtime": NoEngines(), "tracker": RecordingTracker(), "progress": lambda *_: None}
    handle, _ = execute(store, toy_spec(label="first", seed=17, pipeline="mini"), **made)
    if state == "failed":
        config = ToyConfig(kl_coef=0.1, trouble="raise:2")
        with pytest.raises(ValueError, match="went wrong"):
            execute(store, toy_spec(config, label="second", seed=17, inputs={"policy": handle}), **made)
    elif state == "damaged":
        (store.path(handle) / "total.txt").chmod(0o644)
        (store.path(handle) / "total.txt").write_text("")
    assert main(["explain", stage, "--profile", profile]) == 0
    out = capsys.readouterr().out
    *lines, last = out.splitlines()
    assert re.match(said, out) and len(lines) < 15 and "->" not in out
    following = (
        f"chat {handle.digest[:12]} --profile {profile}" if command == "chat" else f"run {profile} --until {stage}"
    )
    assert last == f"next: rlhf {following}"


def test_explain_names_what_the_key_cannot_see(here, capsys, monkeypatch):
    (here / "mine.py").write_text("def reward(x): return open('[b]answers[/b].json')\n")
    decision = Decision("RUN", "first run", "k" * 64, None)
    stage = PlannedStage("ppo", toy_spec(callables=("mine.py:reward",)), decision)
    monkeypatch.chdir(here)
    store = ArtifactStore(here / "store")
    config = load_profile("tiny/full")
    monkeypatch.setattr(
        "pipelines.cli.plan_verbs.planned_stages", lambda options, *, here=True: (config, store, [stage])
    )
    handle = PolicyRef(uri=f"store://{'a' * 64}", digest="a" * 64)
    record = SimpleNamespace(
        unseen=("reads /a/b.json",), to_json=dict, environment={}, failures={},
        handle=handle, metrics={}, seconds=1.0, attempts=1,
    )  # fmt: skip
    monkeypatch.setattr(ArtifactStore, "record", lambda store, key: record)
    lines = [
        "not in the key: mine.py reads files (open, line 1); what counts: DEPENDS_ON there",
        "not in the key, as seen when it ran: reads /a/b.json",
    ]
    assert main(["explain", "ppo", "--profile", str(write_mini(here))]) == 0
    assert "\n".join(lines) in capsys.readouterr().out
    assert main(["plan", str(write_mini(here))]) == 0
    *notes, imported = capsys.readouterr().out.splitlines()[1:-1]
    assert notes == [f"ppo: {line}" for line in lines]
    assert imported.startswith("imports: mine.py, ") and "vllm" not in imported, "an engine is not named by path"


def test_looking_at_a_store_that_is_not_there_says_what_to_do_and_makes_nothing(here, capsys):
    looks = [["store", "ls"], ["store", "verify"], ["store", "gc"], ["runs"], ["reconcile"], ["resume"]]
    assert [main(look) for look in looks] == [0] * len(looks)
    out = capsys.readouterr().out
    assert out.count("home/store does not exist yet: fill it with `rlhf run tiny/full`") == 3
    assert "nothing to reconcile" in out and "nothing was run yet" in out
    assert f"no run is recorded in {here}/home: start one with `rlhf run tiny/full`" in out
    assert main(["plan", str(write_mini(here))]) == 0
    assert not (here / "home").exists()


@pytest.mark.parametrize(
    "arguments",
    [["store", "ls"], ["store", "verify"], ["store", "gc"], ["runs"], ["reconcile"], ["chat", "sft"], ["plan", "tiny/full"],
     ["explain", "sft"], ["run", "tiny/full"]],
)  # fmt: skip
def test_a_store_of_a_newer_version_is_refused_by_every_verb(here, capsys, arguments, monkeypatch):
    monkeypatch.setattr("pipelines.cli.run_command.prefect_server", lambda home: nullcontext())
    store = here / "home" / "store"
    store.mkdir(parents=True)
    (store / "store.json").write_text('{"schema": 3}')
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"store = {store}: was written by a newer version (schema 3, this one knows 2); upgrade, or"
    )
    assert [path.name for path in store.iterdir()] == ["store.json"]


def test_a_damaged_store_is_listed_with_its_damage_and_planned_with_the_reason(here, capsys):
    config = load_profile(write_mini(here))
    store = ArtifactStore(here / "home" / "store")
    specs = [toy_spec(ToyConfig(kl_coef=rate), label=label, seed=config.seed) for label, rate in RATES.items()]
    for spec in specs:
        execute(store, spec, runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None)
    records = {record.label: record for record in store.records()}
    short = store.path(records["short"].handle) / "total.txt"
    short.chmod(0o644)
    short.write_text("")
    remove_tree(store.path(records["gone"].handle))
    (store.root / "tables" / "keys" / f"{records['torn'].key}.json").write_text("{")

    assert main(["store", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[2]: line for line in lines if len(line.split()) > 2}
    assert "damaged" not in said["sound"]
    assert "damaged: total.txt has 0 bytes" in said["short"] and "damaged: its object is gone" in said["gone"]
    assert any(line.startswith("not readable: ") and "has other content than was written" in line for line in lines)
    assert main(["store", "ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["label"] for one in found["artifacts"] if one["damage"]} == {"short", "gone"}
    assert len(found["unreadable"]) == 1
    assert main(["store", "gc", "--keep-days", "0"]) == 0
    assert "`rlhf store verify --set-aside` first" in capsys.readouterr().out

    assert main(["store", "verify"]) == 1
    assert "3 damaged: run `rlhf store verify --set-aside`" in capsys.readouterr().out
    with pytest.raises(ArtifactError, match="has other content than was written"):
        decide(store, specs[-1])
    assert main(["store", "verify", "--set-aside"]) == 1
    assert capsys.readouterr().out.count("total.txt has 0 bytes") == 1
    assert main(["store", "ls"]) == 0
    assert f"set aside: short {records['short'].key}: total.txt has 0 bytes" in capsys.readouterr().out
    reasons = {spec.label: decide(store, spec) for spec in specs}
    assert {label: found.action for label, found in reasons.items()} == dict.fromkeys(RATES, "RUN") | {"sound": "HIT"}
    assert "total.txt has 0 bytes" in reasons["short"].reason
    remove_tree(store.path(records["sound"].handle))
    aside = ["store", "verify", "--set-aside"]
    assert [main(aside), main(aside)] == [1, 0], "the first finds the damage"


RATES = {"sound": 0.1, "short": 0.2, "gone": 0.3, "torn": 0.4}


def test_the_store_of_a_profile_or_a_folder_can_be_looked_at(here, capsys):
    profile = write_mini(here)
    profile.write_text(f'store = "{here}/own"\n' + profile.read_text())
    for which in (["--profile", str(profile)], ["--store", f"{here}/own"]):
        assert main(["runs", *which]) == main(["store", "ls", *which]) == 0
        out = capsys.readouterr().out
        assert f"{here}/own does not exist yet" in out and "no run is recorded" in out


@pytest.mark.parametrize(
    "verb",
    [
        "import pipelines.cli.main",
        f"import {', '.join(sorted({place.partition(':')[0] for place in VERBS.values()}))}",
        "import sys, pipelines.execution.local; assert 'numpy' not in sys.modules",  # the imports of a plan
        "import sys; from pipelines.cli.main import _parser; _parser('plan'); assert 'pydantic' not in sys.modules",  # help
    ],
)
def test_no_engine_is_imported_before_it_is_needed(verb):
    code = f"{verb}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_table_of_verbs_names_functions_that_take_the_options():
    for place in VERBS.values():
        module, _, function = place.partition(":")
        found = getattr(importlib.import_module(module), function)
        assert list(inspect.signature(found).parameters) == ["options"], place


def test_without_a_command_the_commands_are_listed_in_groups_with_examples(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "\n  plan             Show which stages a run would execute" in printed
    examples = re.findall(r"^  rlhf (.+?) {2,}", printed, flags=re.M)
    assert len(examples) == 3 and all(_parser().parse_args(line.split()).verb for line in examples)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out == printed


def test_the_help_of_every_command_fits_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parsers = [_parser()]
    for parser in parsers:
        assert [line for line in parser.format_help().splitlines() if len(line) > 80] == [], parser.prog
        parsers += _commands(parser).values()
    assert len(parsers) > 40


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["pln", "tiny/full"], 2, "invalid choice: 'pln'; did you mean plan?\n"),
        (["store", "lss"], 2, "invalid choice: 'lss'; did you mean ls?\n"),
        (["sweep", "tiny/full", "--direction", "mim"], 2, "invalid choice: 'mim'; did you mean min?\n"),
        (["zzz"], 2, "invalid choice: 'zzz'; choose from approve, "),
        (
            ["plan", "p", "--sett", "a=b"],
            2,
            "rlhf plan: error: unrecognized arguments: --sett a=b; did you mean --set?\n",
        ),
        (["store", "ls", "--jsn"], 2, "usage: rlhf store ls "),
        (["plan", "p", "--until", "sft", "--until=ppo"], 2, "argument --until: is there twice, and takes one value; "),
        (["store", "gc", "--store", ""], 2, "argument --store: is empty; leave it out, or give it a value\n"),
        (["deploy", "p", "--pool="], 2, "argument --pool: is empty; leave it out, or give it a value\n"),
        (["scaffold", "slurm", "--out", ""], 2, "argument --out: is empty; give it a value\n"),
        (["resume", ""], 2, "is empty; leave it out, or give it a value\n"),
        (["plan", "--help"], 0, "PROFILE"),
        (["--version"], 0, f"rlhf {version('rlhf-lifecycle')}\n"),
    ],
)
def test_misspelled_commands_get_a_suggestion_and_version_prints_one(capsys, arguments, status, printed):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == status and printed in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "given", [("PYTHONWARNINGS", "error"), ("PYTHONWARNINGS", "error::DeprecationWarning"), ("-W", "error")]
)
def test_no_setting_turns_a_warning_of_a_library_into_the_end_of_a_run(given):
    warned = "import warnings; warnings.warn('old', DeprecationWarning); "
    further = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {warned!r}], check=True); "
    name, value = given
    options, environment = ([name, value], {}) if name == "-W" else ([], {name: value})
    code = f"from pipelines.cli.main import show_warnings; show_warnings(); {warned}{further}"
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "DeprecationWarning: old" in done.stderr, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_interrupts_a_verb_and_its_handlers_are_put_back(monkeypatch, capsys, number):
    monkeypatch.setattr("pipelines.cli.main._verb", lambda options: lambda options: signal.raise_signal(number))
    own = signal.signal(number, signal.default_int_handler)  # under nohup a hang-up is ignored
    try:
        assert main(["status"]) == 130
        assert "interrupted; finished work is kept" in capsys.readouterr().err
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, own)
