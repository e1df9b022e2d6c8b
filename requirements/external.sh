#!/usr/bin/env bash
# Install each program of others that tests drive into an environment of its own, .venv-external/NAME, from the pins in
# external/NAME.txt; then run the tests of external programs with those that are there. Where a variable names an interpreter
# that has it, that one is taken. One that cannot be installed is said in a line, and its tests are skipped. Fails if a test
# does, or if nothing is there. Needs VENV, as `make install` makes it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
uv=uv
uv --version >/dev/null 2>&1 || uv=$venv/bin/uv

installed=0
install() {  # NAME VARIABLE PYTHON: the variable is what the tests read; PYTHON is found, or downloaded by uv
  local folder=.venv-external/$1 pins=requirements/external/$1.txt log=.venv-external/$1.log stamp
  if [ -n "${!2:-}" ]; then
    echo "$2 is set: $1 is tested with ${!2}"
    installed=$((installed + 1))
    return
  fi
  stamp="$3 $(sha256sum < "$pins" | cut -c1-64)"
  if [ "$(cat "$folder/.installed" 2>/dev/null)" != "$stamp" ]; then
    echo "installing $pins into $folder"
    if ! { "$uv" venv -q --clear --python "$3" "$folder" \
      && "$uv" pip install -q --python "$folder/bin/python" --no-deps -r "$pins"; } >"$log" 2>&1; then
      echo "not installed: $1 on Python $3, so its tests are skipped ($log: $(grep -m1 . "$log"))"
      return
    fi
    echo "$stamp" > "$folder/.installed"
  fi
  export "$2=$PWD/$folder/bin/python"
  installed=$((installed + 1))
}

mkdir -p .venv-external
install openenv RLHF_TEST_OPENENV_PYTHON "3.11"
install nemo-gym RLHF_TEST_NEMO_GYM_PYTHON ">=3.13.14,<3.14"
install verifiers-legacy RLHF_TEST_VERIFIERS_LEGACY_PYTHON "3.11"
install verifiers RLHF_TEST_VERIFIERS_PYTHON "3.11"
if [ $installed = 0 ]; then
  echo "none of the external programs could be installed: nothing is tested" >&2
  exit 1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0
exec "$venv/bin/python" -m pytest -q -rs -o log_cli=true --log-cli-level=INFO \
  tests/stages/test_external_agents.py tests/stages/test_external_rewards.py \
  tests/rlhf_contrib/environments/test_openenv.py tests/rlhf_contrib/environments/test_nemo_gym.py tests/rlhf_contrib/environments/test_verifiers.py "$@"
