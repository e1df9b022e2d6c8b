"""Write the pages that repeat the code: the reference of all settings, the map of the code, the tables of methods and stages.

    python -m docs.generate_reference

The reference has one page per section of a profile, from the configuration classes. It goes to `docs/reference/`, which git
ignores: `make docs` writes it anew, so it cannot be out of date. The files in `KEPT` are part of the repository.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.flows import run_rules
from pipelines.flows.profile import PipelineConfig
from pipelines.prefect_flows.deployments import STAGE_TAG, deployments
from rlhf_core.algorithms import advantage, policy, preference
from rlhf_core.schema.base import Config, Operational
from stages.table import STAGES

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
READMES = sorted(ROOT.glob("rlhf_contrib/*/README.md"))
"""The pages of the topics of `rlhf_contrib`."""
SHARED = "shared_tables"
FAMILIES = {
    "Losses on preferences: `[dpo.loss] type`": preference,
    "Policy losses: `[ppo.loss] type`": policy,
    "Advantage estimators: `[ppo.advantage] type`": advantage,
}
"""A heading of the page of methods -> the package with the methods below it."""
Schema = Mapping[str, Any]

INTRODUCTION = """# Every setting

A profile is a TOML file with the sections below. A section that is left out switches that part of the pipeline off; `rlhf plan
PROFILE --set ppo.steps=20` overrides one key. Unknown keys are refused with the nearest known one.

*In the key: no* marks settings that change how a stage runs but not its result, so a change does not run the stage again
([keys](../keys.md)). Tables that several sections have in common are in [shared tables](shared_tables.md).
"""


CODE_MAP_INTRODUCTION = """# Every file

Layers, from the top: `rlhf_contrib` ([topics](../contrib.md) that the lifecycle can do without), `pipelines` (Prefect, the command
line), `stages` (one folder per stage), `rlhf_core` (the library). A package imports only packages below it; `lint-imports` checks
this. `python -m docs.generate_reference` writes this page from the first sentence of each module.
"""

METHODS_INTRODUCTION = """# Methods

Each row is the docstring of a class in `rlhf_core/algorithms`. Notation: a = log pi(y_c) - log pi_ref(y_c) for the chosen answer, b the same
for the rejected answer, h = a - b. rho = pi / pi_old of a token, A its advantage, w its importance weight. r are rewards. A group
is the completions of one prompt.
"""


def pages() -> dict[str, str]:
    """Return page name -> Markdown: the index, a page per section, and the tables that sections share."""
    schema = PipelineConfig.model_json_schema()
    tables: Mapping[str, Schema] = schema["$defs"]
    sections = {name: owned(field, tables) for name, field in schema["properties"].items() if references(field)}
    uses = Counter(table for found in sections.values() for table in found)
    home = {table: name for name, found in sections.items() for table in found if uses[table] == 1}
    home |= {table: SHARED for table, count in uses.items() if count > 1}
    home |= {found[0]: name for name, found in sections.items()}
    written = {"index": INTRODUCTION + "\n" + sections_table(schema, tables, home, sections)}
    for name, found in sections.items():
        own = [table for table in found if home[table] == name]
        written[name] = page(f"[{name}]", own, tables, name, home)
    shared = sorted(table for table, where in home.items() if where == SHARED)
    written[SHARED] = page("Shared tables", shared, tables, SHARED, home)
    return written


def owned(schema: Schema, tables: Mapping[str, Schema]) -> list[str]:
    """Return the tables that a section consists of, its own first."""
    found: dict[str, None] = {}
    waiting = references(schema)
    while waiting:
        table = waiting.pop(0)
        if table not in found:
            found[table] = None
            waiting += references(tables[table])
    return list(found)


def references(schema: Any) -> list[str]:
    """Return the tables that a schema names, in order.

    >>> references({"anyOf": [{"$ref": "#/$defs/LoraConfig"}, {"type": "null"}]})
    ['LoraConfig']
    """
    if isinstance(schema, Mapping):
        here = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return here + [name for key, value in schema.items() if key != "default" for name in references(value)]
    return [name for value in schema for name in references(value)] if isinstance(schema, list) else []


def page(title: str, own: list[str], tables: Mapping[str, Schema], name: str, home: Mapping[str, str]) -> str:
    """Return a page with a heading and a table of keys for each configuration class."""
    parts = [f"# {title}"]
    for table in own:
        parts += [f"## {class_name(table)}", meaning(tables[table]), fields_table(table, tables, name, home)]
    return "\n\n".join(part for part in parts if part) + "\n"


def sections_table(
    schema: Schema, tables: Mapping[str, Schema], home: Mapping[str, str], sections: Mapping[str, list[str]]
) -> str:
    """Return the top level of a profile: the sections with links to their pages, and the keys outside of them."""
    rows = ["| section or key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        shown = f"[`{name}`]({name}.md)" if name in sections else f"`{name}`"
        described = field if "description" in field or name not in sections else tables[sections[name][0]]
        cells = [type_text(field, "index", home), default_text(field, tables), meaning(described)]
        rows.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def fields_table(table: str, tables: Mapping[str, Schema], where: str, home: Mapping[str, str]) -> str:
    """Return the keys of a configuration class with type, default, whether they are in the stage's key, and meaning."""
    if "properties" not in tables[table]:
        return "It has no keys."
    operational = operational_fields(table)
    rows = ["| key | type | default | in the key | meaning |", "|---|---|---|---|---|"]
    for name, field in tables[table]["properties"].items():
        kept = "no" if name in operational else "yes"
        cells = [f"`{name}`", type_text(field, where, home), default_text(field, tables), kept, meaning(field)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def meaning(schema: Schema) -> str:
    return cell(one_line(schema["description"])) if "description" in schema else ""


def default_text(field: Schema, tables: Mapping[str, Schema]) -> str:
    """Return the default of a key; of a table what differs from the defaults of its own keys.

    >>> default_text({"type": "integer", "default": 3}, {}), default_text({"type": "integer"}, {})
    ('`3`', 'required')
    """
    if "default" not in field:
        return "required"
    value = field["default"]
    if value is None:
        return "none"
    if isinstance(value, dict):
        value = changed(value, field, tables)
    return cell(f"`{toml(value)}`")


def changed(value: Mapping[str, Any], field: Schema, tables: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the entries of a table's default that are not the defaults of the table itself; its `type` always."""
    for table in references(field):
        own = tables[table]["properties"] if "properties" in tables[table] else {}
        same_type = "type" not in value or ("type" in own and own["type"].get("const", value["type"]) == value["type"])
        if set(value) <= set(own) and same_type:
            return {
                key: one
                for key, one in value.items()
                if key == "type" or "default" not in own[key] or own[key]["default"] != one
            }
    return dict(value)


def toml(value: Any) -> str:
    """Return a value as TOML writes it on one line.

    >>> toml({"batch_size": 32, "stop": ["a"], "best": True})
    '{batch_size = 32, stop = ["a"], best = true}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items() if one is not None) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def type_text(schema: Schema, where: str, home: Mapping[str, str]) -> str:
    """Return the type of a key in the words of TOML, with links to tables, and its bounds.

    >>> type_text({"type": "integer", "minimum": 1}, "sft", {})
    'integer, >= 1'
    >>> type_text({"anyOf": [{"$ref": "#/$defs/LoraConfig"}, {"type": "null"}]}, "sft", {"LoraConfig": "shared_tables"})
    '[LoraConfig](shared_tables.md#loraconfig)'
    """
    return ", ".join([*kinds(schema, where, home), *bounds(schema)])


def kinds(schema: Schema, where: str, home: Mapping[str, str]) -> list[str]:
    match schema:
        case {"$ref": str(ref)}:
            table = ref.rpartition("/")[2]
            page_name = "" if home[table] == where else f"{home[table]}.md"
            return [f"[{class_name(table)}]({page_name}#{class_name(table).lower()})"]
        case {"const": value}:
            return [f"`{json.dumps(value)}`"]
        case {"enum": values}:
            return [" or ".join(f"`{json.dumps(value)}`" for value in values)]
        case {"anyOf": list(options)} | {"oneOf": list(options)}:
            given = [option for option in options if option != {"type": "null"}]
            return [" or ".join(type_text(option, where, home) for option in given)]
        case {"type": "array", "prefixItems": list(items)}:
            return [f"[{'; '.join(type_text(item, where, home) for item in items)}]"]
        case {"type": "array", "items": items}:
            return [f"list of {type_text(items, where, home)}"]
        case {"type": "object", "additionalProperties": Mapping() as values}:
            return [f"table of {type_text(values, where, home)}"]
        case {"type": str(name)}:
            return [name.replace("object", "table").replace("number", "float")]
    return ["any value"]


def bounds(schema: Schema) -> Iterator[str]:
    """Yield the bounds of a number and the lengths of a text or list."""
    signs = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
        "minLength": "characters >=",
        "maxLength": "characters <=",
        "minItems": "entries >=",
        "maxItems": "entries <=",
    }
    for name, sign in signs.items():
        if name in schema:
            yield f"{sign} {schema[name]}"


def class_name(table: str) -> str:
    """Return the name of a class by its name in the schema.

    >>> class_name("stages__publish__Threshold")
    'Threshold'
    """
    return table.rpartition("__")[2]


def operational_fields(table: str) -> set[str]:
    """Return the fields of a configuration class that are in no stage's key."""
    kind = classes()[table]
    fields = kind.model_fields
    if kind.__module__ == run_rules.__name__:  # they decide what is run, and nothing that a stage makes
        return set(fields)
    return {name for name, field in fields.items() if any(isinstance(mark, Operational) for mark in field.metadata)}


def classes() -> dict[str, type[Config]]:
    """Return name -> configuration class; the schema adds the module where two classes have one name."""
    found: dict[str, type[Config]] = {}
    waiting: list[type[Config]] = [Config]
    while waiting:
        one = waiting.pop()
        if one.__module__.partition(".")[0] in ("pipelines", "stages", "rlhf_core"):
            found[one.__name__] = found[f"{one.__module__.replace('.', '__')}__{one.__name__}"] = one
        waiting += one.__subclasses__()
    return found


def one_line(text: str) -> str:
    """Return a description as one line: the signature that pydantic shows of a class is none."""
    return re.sub(r"\s+", " ", text.strip())


def cell(text: str) -> str:
    """Return text that does not end a cell of a table.

    >>> cell("min | max")
    'min \\\\| max'
    """
    return text.replace("|", "\\|").replace("<", "&lt;")


def site_pages() -> dict[str, str]:
    """Return page name -> Markdown of every page in `docs/reference` that this program writes."""
    return pages() | topic_pages() | {"code_map": code_map(), "methods": methods()}


def code_map() -> str:
    """Return the first sentence of each module and folder of the packages, as a page."""
    written = [CODE_MAP_INTRODUCTION]
    for package in ("pipelines", "stages", "rlhf_core", "rlhf_contrib"):
        rooms = {path.parent for path in (ROOT / package).rglob("*.py")}
        for room in sorted(room for room in rooms if room.parent.name != "stages"):
            written.append(f"\n## `{room.relative_to(ROOT)}/`\n\n{sentence_of(room / '__init__.py')}".rstrip() + "\n\n")
            files = sorted(file for file in room.glob("*.py") if file.name != "__init__.py")
            written += [f"- `{file.name}`: {sentence_of(file)}\n" for file in files]
            if room.name == "stages":  # a folder per stage
                written += [f"- `{file.parent.name}/`: {sentence_of(file)}\n" for file in sorted(room.glob("*/run.py"))]
    return "".join(written)


def sentence_of(file: Path) -> str:
    """Return the first sentence of a module's docstring, "" if it has none."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = one_line(text.partition("\n\n")[0])
    return re.split(r"(?<=[.:])\s+(?=[A-Z`])", paragraph)[0].removesuffix(":")


def methods() -> str:
    """Return the page of methods: a table for each family, with a row from the docstring of each class."""
    parts = [METHODS_INTRODUCTION]
    for heading, family in FAMILIES.items():
        rows = "".join(f"{method_row(kind)}\n" for kind in family.METHODS)
        parts.append(f"\n## {heading}\n\n| type | description | formula | reference |\n|---|---|---|---|\n{rows}")
    return "".join(parts)


def method_row(kind: type[Config]) -> str:
    """Return the row of a method; its docstring is one sentence, `Formula: ...` and `Reference: ...`."""
    found = re.match(r"(.+)\n\nFormula: (.+)\nReference: (.+)(\n\n|$)", inspect.getdoc(kind) or "")
    assert found is not None, f"{kind.__name__} needs a docstring of one sentence, `Formula: ...` and `Reference: ...`"
    title, formula, reference = (part.rstrip(".").replace("|", "\\|") for part in found.groups()[:3])
    return f"| `{kind.model_fields['type'].default}` | {title} | `{formula}` | {reference} |"


def every_stage(page: str) -> str:
    """Return the page of short stages with its list of all stages written anew: each page, and the stages on it."""
    head, heading, _ = page.partition("## Every stage\n")
    assert heading, "docs/stages.md has no heading `Every stage`"
    pages = dict.fromkeys(one.page for one in STAGES.values())
    named = {page: ", ".join(f"`{one.name}`" for one in STAGES.values() if one.page == page) for page in pages}
    return "\n".join([f"{head}{heading}", *(f"- [{page}]({page}): {names}" for page, names in named.items()), ""])


def strict_stages(page: str) -> str:
    """Return the page on keys with the stages whose code is part of their keys."""
    names = ", ".join(sorted(f"`{one.name}`" for one in STAGES.values() if one.code == "strict"))
    page, count = re.subn(r'(`code = "strict"` in their declaration: )[^|]+', lambda found: f"{found[1]}{names} ", page)
    assert count == 1, "docs/keys.md has no list of strict stages"
    return page


def work_pools(text: str) -> str:
    """Return prefect.yaml with an entry for each stage; those of pipelines are written by hand."""
    head = re.split(r"^.*stage_flows\.py:", text, maxsplit=1, flags=re.M)[0]
    entries = [head.rstrip("\n")]
    for one in deployments():
        if one.tags == [STAGE_TAG]:
            function = one.entrypoint.rpartition(".")[2]
            fields = ", ".join(f'{field}: "{{{{ {one.name}.{field} }}}}"' for field in one.parameters)
            entries.append(
                f'  - {{name: {one.name}, entrypoint: "pipelines/prefect_flows/stage_flows.py:{function}", work_pool: *pool,\n'
                f"     parameters: {{{fields}}}, tags: [{STAGE_TAG}]}}"
            )
    return "\n".join([*entries, ""])


def topic_pages() -> dict[str, str]:
    """Page name -> the README of a topic of `rlhf_contrib`, with its links as the site has them."""
    texts = {file.parent.name: file.read_text(encoding="utf-8") for file in READMES}
    return {f"contrib_{topic}": text.replace("](../../docs/", "](../") for topic, text in texts.items()}


def topics(page: str) -> str:
    """The page on `rlhf_contrib` with its table written anew: each topic with the first paragraph of its README."""
    rows = ""
    for name, text in topic_pages().items():
        paragraph = one_line(text.split("\n\n")[1])
        rows += f"| [`{name.removeprefix('contrib_')}`](reference/{name}.md) | {paragraph} |\n"
    page, count = re.subn(r"(\| topic \|.*\n\|.*\n)(?:\|.*\n)*", lambda found: found[1] + rows, page)
    assert count == 1, "docs/contrib.md has no table of topics"
    return page


KEPT: Mapping[str, Callable[[str], str]] = {
    "prefect.yaml": work_pools,
    "docs/stages.md": every_stage,
    "docs/keys.md": strict_stages,
    "docs/contrib.md": topics,
}
"""File -> the function that returns its new text from its present one."""


def main() -> int:
    for name, written in KEPT.items():
        (ROOT / name).write_text(written((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
    REFERENCE.mkdir(exist_ok=True)
    for old in REFERENCE.glob("*.md"):
        old.unlink()
    for name, text in site_pages().items():
        (REFERENCE / f"{name}.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
