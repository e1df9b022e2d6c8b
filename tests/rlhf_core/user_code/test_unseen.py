from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.user_code.dependencies import unseen_by_programs, unseen_reads

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
def test_what_the_key_does_not_see_is_named(tmp_path: Path, code: str, found: str) -> None:
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
def test_what_the_key_sees_is_not_named(tmp_path: Path, code: str) -> None:
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "helpers.py").write_text("def load_rules(): ...\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "package" / "leaf.py").write_text("from . import VALUE\nfrom .. import beyond\n")
    (tmp_path / "mine.py").write_text(code)
    assert unseen_reads(f"{tmp_path}/mine.py:f") == []


def test_what_a_helper_reads_is_named_and_what_packages_and_this_program_read_is_not(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("VALUE = open('a').read()\n")
    (tmp_path / "mine.py").write_text("from helpers import VALUE\nimport torch\ndef f(): return torch\n")
    assert unseen_reads(f"{tmp_path}/mine.py:f") == ["helpers.py reads files (open, line 1; read, line 1)"]
    assert unseen_reads("rlhf_core.rewards.library.code:code_reward") == unseen_reads("math_verify:verify") == []


def test_what_a_program_imports_is_named_unless_it_is_one_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("import os\nVALUE = os.environ['A']\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "agent.py").write_text("import helpers, broken, json\n")
    files = [f"{tmp_path}/{name}" for name in ("agent.py", "helpers.py", "broken.py")]
    reads = "helpers.py reads environment variables (environ, line 2)"
    assert unseen_by_programs(files) == [reads]
    imports = [f"agent.py imports {tmp_path}/{name}.py" for name in ("broken", "helpers")]
    assert unseen_by_programs([files[0], "run.sh"]) == [*imports, reads]
