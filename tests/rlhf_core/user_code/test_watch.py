from __future__ import annotations

import py_compile
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.user_code.dependencies import UserFunction, unseen_by_programs, unseen_reads, user_code_digest
from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.watch import MOST_NOTES, noted

HEAD = """
DEPENDS_ON = ("declared.json", "tables")
import asyncio, configparser, ctypes, importlib.util, os, pickle, runpy, socket, sqlite3, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
import helpers
HERE = Path(__file__).parent
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Files that a user's function may read, and the folder of a stage's work in a store."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("data.json", "declared.json", "tables/a.csv", "store/objects/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / "x.ini").write_text("[a]\nb = 1\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "far.py").write_text("VALUE = 1\n")
    py_compile.compile(str(tmp_path / "lib" / "far.py"))
    (tmp_path / "helpers.py").write_text("def read(path):\n    return path.read_text()\n")
    np.save(tmp_path / "a.npy", np.ones(2))
    sqlite3.connect(tmp_path / "a.db").execute("create table t (a)").connection.close()
    (tmp_path / "store" / "attempts" / "key" / "work-1").mkdir(parents=True)
    return tmp_path


def notes(folder: Path) -> Path:
    return folder / "store" / "attempts" / "key" / "work-1" / "unseen.jsonl"


def seen(folder: Path, body: str, *, before: str = "") -> list[str]:
    """Return what is noted when a function with this body runs; folders are written as they are in `body`."""
    lines = "\n    ".join(body.splitlines())
    (folder / "mine.py").write_text(f"{HEAD}{before}\ndef f():\n    {lines}\n")
    load_callable("function", f"{folder}/mine.py:f", notes=str(notes(folder)))()
    return [note.replace(f"{folder}/", "") for note in noted(notes(folder))]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("open(HERE / 'data.json').read()", "reads data.json"),
        ("os.open(os.fsencode(HERE / 'data.json'), os.O_RDONLY)", "reads data.json"),
        ("os.chdir(HERE)\nopen('data.json')", "reads data.json"),
        ("helpers.read(HERE / 'data.json')", "reads data.json"),
        ("getattr(np, 'lo' + 'ad')(HERE / 'a.npy')", "reads a.npy"),
        ("configparser.ConfigParser().read(HERE / 'x.ini')", "reads x.ini"),
        ("sqlite3.connect(HERE / 'a.db')", "reads a.db"),
        ("sys.path.insert(0, str(HERE / 'lib'))\nimport far", "reads lib/far.py"),
        (("s = importlib.util.spec_from_file_location('far', HERE / 'lib' / 'far.py'); "
          "s.loader.exec_module(importlib.util.module_from_spec(s))"), "reads lib/far.py"),
        ("runpy.run_path(str(HERE / 'lib' / 'far.py'))", "reads lib/far.py"),
        ("with ThreadPoolExecutor() as pool: list(pool.map(helpers.read, [HERE / 'data.json']))", "reads data.json"),
        ("subprocess.run(['/bin/true', 'a secret'])", "starts /bin/true"),
        ("os.system('true a secret')", "starts true"),
        ("socket.socket().connect_ex(('127.0.0.1', 9))", "connects to 127.0.0.1:9"),
        ("try: socket.create_connection(('localhost', 9))\nexcept OSError: pass", "connects to localhost:9"),
    ],
)  # fmt: skip
def test_what_the_code_reaches_and_the_key_does_not_see_is_noted_once(folder, monkeypatch, body, found):
    monkeypatch.chdir(folder)
    assert seen(folder, "\n".join([body, body])) == [found]


@pytest.mark.parametrize(
    "body",
    [
        "open(HERE / 'declared.json').read(), open(HERE / 'tables' / 'a.csv').read()",
        "open(__file__).read(), open(HERE / 'helpers.py').read()",
        "open(HERE / 'store' / 'objects' / 'a.json')",
        "open('/proc/self/status'), open('/dev/null'), open('/etc/hostname')",
        "open(np.__file__), open(os.__file__), open(sys.executable, 'rb')",
        "import colorsys, xml.dom.minidom, rlhf_core.types",
        "with tempfile.NamedTemporaryFile('w') as out: print(1, file=out, flush=True); open(out.name).read()",
        "(HERE / 'made.txt').write_text('1'); (HERE / 'made.txt').read_text()",
        "try: open(HERE / 'missing.json')\nexcept OSError: pass",
        "pickle.loads(pickle.dumps(HERE)), os.listdir(HERE), os.stat(HERE / 'data.json')",
    ],
)
def test_what_the_key_sees_or_nobody_edits_is_not_noted(folder, body):
    assert seen(folder, body) == []


def test_what_is_read_while_the_file_is_loaded_is_noted_and_what_others_read_is_not(folder):
    assert seen(folder, "...", before="DATA = open(HERE / 'data.json').read()") == ["reads data.json"]
    (folder / "x.ini").read_text()
    assert noted(notes(folder)) == (f"reads {folder}/data.json",)


def test_a_function_that_reads_a_file_for_each_answer_is_noted_within_limits(folder):
    body = f"for i in range({2 * MOST_NOTES}): open(HERE / f'answer-{{i}}').read()"
    for number in range(2 * MOST_NOTES):
        (folder / f"answer-{number}").write_text("")
    assert len(seen(folder, body)) == MOST_NOTES


def test_threads_of_libraries_are_watched_in_a_process_that_runs_nothing_else(folder):
    (folder / "mine.py").write_text(
        f"{HEAD}\ndef f():\n    return asyncio.run(asyncio.to_thread((HERE / 'data.json').read_text))\n"
    )
    program = (
        "from rlhf_core.user_code import modules as loading, watch\n"
        f"f = loading.load_callable('k', '{folder}/mine.py:f', notes='{notes(folder)}')\nwatch.watch_process()\nf()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert noted(notes(folder)) == (f"reads {folder}/data.json",)


def test_watching_changes_no_digest_and_a_line_that_a_kill_cut_short_is_left_out(folder):
    (folder / "mine.py").write_text("def f(): return open(__file__ + '/../data.json')")
    spec = f"{folder}/mine.py:f"
    digest = user_code_digest(spec)
    UserFunction.of(spec, digest, notes=str(notes(folder))).load(key="loss.function")
    assert user_code_digest(spec) == digest
    notes(folder).write_text('"reads a"\n"reads b"\n"rea')
    assert noted(notes(folder)) == ("reads a", "reads b")


# ---------------------------------------------------------------- before the code runs


FILES, VARIABLES, COMPUTED = "reads files", "reads environment variables", "imports modules by a computed name"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(): open('a')", f"{FILES} (open, line 1)"),
        ("from io import open as o\ndef f(): o('a')", f"{FILES} (open, line 2)"),
        ("def f(reader=open): pass", f"{FILES} (open, line 1)"),
        ("from pathlib import Path\nTEXT = Path('a').read_text()\ndef f(): ...", f"{FILES} (read_text, line 2)"),
        ("import numpy as np\ndef f(): np.load('a')", f"{FILES} (load, line 2)"),
        ("from numpy import load as l\ndef f(): l('a')", f"{FILES} (load, line 2)"),
        ("import pandas\ndef f(): pandas.read_parquet('a')", f"{FILES} (read_parquet, line 2)"),
        ("import configparser\ndef f(): configparser.ConfigParser().read('a')", f"{FILES} (read, line 2)"),
        ("import torch\ndef f():\n    torch.load('a')\n    open('b')", f"{FILES} (load, line 3; open, line 4)"),
        ("import transformers as t\nM = t.AutoModel.from_pretrained('a')\ndef f(): ...", f"{FILES} (from_pretrained, line 2)"),
        ("import sqlite3\ndef f(): sqlite3.connect('a')", f"{FILES} (connect, line 2)"),
        ("from os import environ as e\ndef f(): return e['A']", f"{VARIABLES} (environ, line 2)"),
        ("import sys\nsys.path.insert(0, 'a')\ndef f(): ...", "changes where modules are found (sys.path, line 2)"),
        ("from importlib.util import spec_from_file_location as s\ndef f(): s('a', 'b')", f"{COMPUTED} (spec_from_file_location, line 2)"),
        ("import runpy\ndef f(): runpy.run_path('a')", f"{COMPUTED} (run_path, line 2)"),
        ("def f(): eval('1')", "runs code from text (eval, line 1)"),
        ("import subprocess as sp\ndef f(): sp.run(['a'])", "starts programs (subprocess.run, line 2)"),
        ("from os import system\ndef f(): system('a')", "starts programs (os.system, line 2)"),
        ("import urllib.request as r\ndef f(): r.urlopen('a')", "reaches the network (urllib.request.urlopen, line 2)"),
        ("import ctypes\ndef f(): ctypes.CDLL('a')", "loads libraries (ctypes.CDLL, line 2)"),
        ("def f():\n    import no_such, beside.no_such\n    from no_such.deep import x",
         "imports what is found nowhere (no_such, line 2; beside.no_such, line 2; no_such.deep, line 3)"),
        ("DEPENDS_ON = ('data.json',)\ndef f(): return open('data.json'), open('else.json')",
         "names files that it does not declare (else.json, line 2)"),
        ("DEPENDS_ON = ('data.json',)\nimport os\ndef f(): return os.environ", f"{VARIABLES} (environ, line 3)"),
        ("DEPENDS_ON = ('env:A',)\ndef f(): return open('data.json')", f"{FILES} (open, line 2)"),
    ],
)  # fmt: skip
def test_what_the_key_does_not_see_is_named(tmp_path, code, found):
    for name in ("data.json", "else.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "beside").mkdir()
    (tmp_path / "mine.py").write_text(code)
    assert unseen_reads(f"{tmp_path}/mine.py:f") == [f"mine.py {found}"]


@pytest.mark.parametrize(
    "code",
    [
        "import helpers\ndef f(): helpers.load_rules()",
        "from helpers import load_rules as load_them\ndef f(): load_them()",
        "class Table:\n    def load(self): self.read()\ndef f(): Table.load(1)",
        "import re, json, torch.nn.functional as F\ndef f(input, model): model.eval(); re.compile('a'); json.loads('1')",
        "import typing\nif typing.TYPE_CHECKING:\n    from no_such import Kind\ndef f(x: Kind): ...",
        "import package.leaf, rlhf_core.types\nfrom package import VALUE\ndef f(): ...",
        "DEPENDS_ON = ('data.json', 'env:A')\nimport os\ndef f(): return open('data.json'), os.environ",
    ],
)
def test_what_the_key_sees_is_not_named(tmp_path, code):
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "helpers.py").write_text("def load_rules(): ...\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "package" / "leaf.py").write_text("from . import VALUE\nfrom .. import beyond\n")
    (tmp_path / "mine.py").write_text(code)
    assert unseen_reads(f"{tmp_path}/mine.py:f") == []


def test_what_a_helper_reads_is_named_and_what_packages_and_this_program_read_is_not(tmp_path):
    (tmp_path / "helpers.py").write_text("VALUE = open('a').read()\n")
    (tmp_path / "mine.py").write_text("from helpers import VALUE\nimport torch\ndef f(): return torch\n")
    assert unseen_reads(f"{tmp_path}/mine.py:f") == ["helpers.py reads files (open, line 1; read, line 1)"]
    assert unseen_reads("rlhf_contrib.sandbox.code:code_reward") == unseen_reads("math_verify:verify") == []


def test_what_a_program_imports_is_named_unless_it_is_one_of_its_files(tmp_path):
    (tmp_path / "helpers.py").write_text("import os\nVALUE = os.environ['A']\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "agent.py").write_text("import helpers, broken, json\n")
    files = [f"{tmp_path}/{name}" for name in ("agent.py", "helpers.py", "broken.py")]
    reads = "helpers.py reads environment variables (environ, line 2)"
    assert unseen_by_programs(files) == [reads]
    imports = [f"agent.py imports {tmp_path}/{name}.py" for name in ("broken", "helpers")]
    assert unseen_by_programs([files[0], "run.sh"]) == [*imports, reads]
