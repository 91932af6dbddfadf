#!/usr/bin/env bash
# Run the tests of TRL's seams against the oldest and the newest TRL that the package's metadata allow.
#   bash scripts/test_matrix.sh                 both ends of the supported range, as the package index has it today
#   bash scripts/test_matrix.sh 1.16.0 1.17.0   these versions
#   VENV=DIR bash scripts/test_matrix.sh        an environment made with `scripts/setup.sh dev`, .venv by default
# Another TRL is laid next to the environment without its dependencies and goes first on the path: a TRL that needs
# other packages than the environment has fails here, which is what one wants to know.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
python=$venv/bin/python
[ -x "$python" ] || { echo "test_matrix.sh: no $python; run: VENV=$venv bash scripts/setup.sh dev" >&2; exit 2; }

installed=$("$python" -c "from importlib.metadata import version; print(version('trl'))")
if [ $# -gt 0 ]; then
    versions=("$@")
else
    # Only final releases; without an index there is the installed one.
    listed=$("$python" -m pip --disable-pip-version-check index versions trl 2>/dev/null | sed -n 's/^Available versions: //p') || true
    [ -n "$listed" ] || echo "test_matrix.sh: the package index does not answer; testing the installed TRL $installed only"
    mapfile -t versions < <("$python" - "${listed:-$installed}" <<'PY'
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
from packaging.version import Version

(trl,) = [r for r in map(Requirement, requires("trl-grpo-ext")) if r.name == "trl"]
found = sorted(Version(text) for text in sys.argv[1].split(", ") if Version(text) in trl.specifier)
print(*dict.fromkeys([found[0], found[-1]]), sep="\n")
PY
)
fi

seams=(tests/test_seams.py)
everything=(tests/test_seams.py tests/test_equals_trl.py tests/test_oracle.py tests/test_window.py tests/test_dead_groups.py)
status=0
for version in "${versions[@]}"; do
    if [ "$version" = "$installed" ]; then
        # the suite itself has run against this one
        echo "== TRL $version (installed): the canaries"
        "$venv/bin/pytest" "${seams[@]}" || status=1
        continue
    fi
    echo "== TRL $version: canaries, equality and gradients"
    target=$venv/trl-$version
    [ -d "$target/trl" ] || "$python" -m pip --disable-pip-version-check install -q --no-deps --target "$target" "trl==$version"
    PYTHONPATH=$target "$venv/bin/pytest" "${everything[@]}" || status=1
done
exit $status
