"""Write the fields that PPOConfig had in one release after another, read from the wheels without running them.

    pip download --no-deps trl==0.2.1 -d WHEELS    # and the other releases
    python tests/compat/golden/make_fields.py WHEELS > tests/compat/golden/fields_by_release.json

Fields inherited from transformers are left out: they depend on its version, not on TRL's.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

CONFIGS = ("PPOConfig", "PPOv2Config")


def classes(wheel: zipfile.ZipFile) -> dict[str, ast.ClassDef]:
    """Return the configuration classes of a wheel and the classes they may inherit fields from."""
    found: dict[str, ast.ClassDef] = {}
    for name in wheel.namelist():
        if re.search(r"(ppo(v2)?_config|trainer/utils)\.py$", name):
            for node in ast.parse(wheel.read(name)).body:
                # An alias that only warns (0.12's PPOv2Config, 0.28's shim) must not hide the class it stands for.
                if isinstance(node, ast.ClassDef) and list(own_fields(node)):
                    found[node.name] = node
    return found


def own_fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of a dataclass's fields, or of the arguments of ``__init__`` (before 0.7)."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            yield from (argument.arg for argument in item.args.args[1:])


def all_fields(name: str, known: dict[str, ast.ClassDef]) -> list[str]:
    """Return the fields of a class and of its bases inside TRL, in order."""
    node = known[name]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
    inherited = [field for base in bases for field in all_fields(base, known)]
    return list(dict.fromkeys([*inherited, *own_fields(node)]))


def main() -> None:
    """Print {era: {release: fields}} as JSON, one release a line, in order."""
    eras: dict[str, dict[str, list[str]]] = {"classic": {}, "v2": {}}

    def release(path: Path) -> tuple[int, ...]:
        return tuple(map(int, path.name.split("-")[1].split(".")))

    for path in sorted(Path(sys.argv[1]).glob("trl-*.whl"), key=release):
        known = classes(zipfile.ZipFile(path))
        for name in CONFIGS:
            if name in known:
                is_v2 = name == "PPOv2Config" or release(path) >= (0, 12)
                eras["v2" if is_v2 else "classic"][".".join(map(str, release(path)))] = all_fields(name, known)
    lines = {
        era: ",\n  ".join(f"{json.dumps(r)}: {json.dumps(f)}" for r, f in rows.items()) for era, rows in eras.items()
    }
    print("{" + ",\n ".join(f'"{era}": {{\n  {text}\n }}' for era, text in lines.items()) + "}")


if __name__ == "__main__":
    main()
