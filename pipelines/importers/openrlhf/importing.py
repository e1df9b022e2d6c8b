"""Implement the verb `import-openrlhf`: read a script, write a profile, show the report."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from pipelines.importers.openrlhf.translate import Translation, report, translate
from rlhf_core.errors import ConfigError, explain

STDIN = "-"
REPORT_WIDTH = 160


def import_script(script: str, *, out: str, lenient: bool, console: Console) -> Translation:
    """Write the profile of `script` to the file `out` and the report to `console`.

    Without `out` the profile goes to standard output and the report to standard error. Raises ConfigError if the script
    does not exist or cannot be read in part, or if `out` exists already.
    """
    target = Path(out).expanduser() if out else Path("openrlhf.toml")
    template = target.with_suffix(".jinja")
    if out:
        _refuse_to_overwrite(target)
    name = target.stem if out or script == STDIN else Path(script).stem
    translation = translate(_read(script), name=name, template_file=str(template), lenient=lenient)
    if out and translation.profile:
        if translation.template:
            _refuse_to_overwrite(template)
            template.write_text(translation.template, encoding="utf-8")
        target.write_text(translation.profile, encoding="utf-8")
    elif not out:
        sys.stdout.write(translation.profile)
        console = Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=REPORT_WIDTH)
    for part in report(translation):
        console.print(part, highlight=False)
    if translation.template and not out:
        console.print(f"to do: write this into {template} (--out does it):\n{translation.template}", markup=False)
    if not translation.profile:
        console.print("no profile is needed for these commands", highlight=False)
    elif out:
        written = f"{target} and {template}" if translation.template else str(target)
        console.print(f"wrote {written}: `rlhf plan {target}` shows its stages", highlight=False, soft_wrap=True)
    return translation


def _read(script: str) -> str:
    try:
        if script == STDIN:
            return sys.stdin.read()
        path = Path(script).expanduser()
        if not path.is_file():
            raise ConfigError(
                explain("script", script, "is not a file", "check the path, or give - for standard input")
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain("script", script, f"cannot be read ({error})", "give a text in UTF-8")) from error


def _refuse_to_overwrite(path: Path) -> None:
    if path.exists():
        raise ConfigError(explain("--out", str(path), "is there already", "move it, or name another file"))
