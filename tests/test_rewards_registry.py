"""Rewards by name, path and callable."""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards import registry
from trl_grpo_ext.rewards.registry import build_rewards, register, required_columns, unique_names
from trl_grpo_ext.rewards.verifier import Verdict, verifier


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


def plain(completions: list[str], gold: list[str], bonus: float = 0.0, **kwargs: Any) -> list[float]:
    return [float(text == answer) + bonus for text, answer in zip(completions, gold, strict=True)]


def test_names_options_and_weights() -> None:
    rewards = build_rewards(["exact", {"numeric": {"weight": 0.5, "reference": "solution"}}])
    assert rewards.names == ["exact", "numeric"]
    assert rewards.weights == [1.0, 0.5]
    assert rewards.columns == {"exact": ("answer",), "numeric": ("solution",)}
    assert rewards.functions[0](completions=["a"], answer=["a"]) == [1.0]


def test_one_entry_needs_no_list() -> None:
    assert build_rewards("exact").names == ["exact"]
    assert build_rewards({"exact": None, "numeric": {}}).names == ["exact", "numeric"]
    assert build_rewards(plain).names == ["plain"]


def test_a_reward_can_be_used_twice_and_named() -> None:
    rewards = build_rewards(["exact", {"exact": {"ignore_case": True}}, {"exact": {"name": "loose"}}])
    assert rewards.names == ["exact", "exact_2", "loose"]
    assert set(rewards.columns) == {"exact", "exact_2", "loose"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (["exat"], "unknown reward 'exat'.*Did you mean 'exact'"),
        ([], "the list is empty"),
        ([{"exact": {"ignore_cas": True}}], "no option 'ignore_cas'.*Did you mean 'ignore_case'"),
        ([{"exact": {"weight": "1"}}], "weight of 'exact' is '1'; it must be a finite number"),
        ([{"exact": {"weight": float("inf")}}], "must be a finite number"),
        ([{"exact": True}], "'exact' is followed by True"),
        ([3], r"an entry is 3 \(int\)"),
        (["no_such_module:reward"], "there is no module 'no_such_module'"),
        (["json:no_such"], "'json' has no 'no_such'"),
        (["math:tau"], "is a float, not a callable"),
        (["missing.py:reward"], "there is no file"),
    ],
)
def test_bad_entries_are_named(spec: list[Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build_rewards(spec)


def test_paths_to_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rewards_of_mine.py").write_text(
        "def short(completions, limit=3, **kwargs):\n    return [float(len(text) < limit) for text in completions]\n"
        "class Judge:\n    def __init__(self, model='a'): self.model = model\n"
        "    def __call__(self, completions, topic, **kwargs): return [1.0] * len(completions)\n"
    )
    rewards = build_rewards(
        [
            "rewards_of_mine.py:short",
            {"rewards_of_mine:short": {"limit": 9, "weight": 2}},
            {"rewards_of_mine.Judge": {"model": "b"}},
        ],
        base_dir=tmp_path,
    )
    assert rewards.names == ["short", "short_2", "Judge"]
    assert [function(completions=["abcd"], topic=["x"]) for function in rewards.functions] == [[0.0], [1.0], [1.0]]
    assert rewards.functions[2].model == "b"
    assert rewards.columns["Judge"] == ("topic",)
    with pytest.raises(ConfigurationError, match=r"has no option 'modle'.*Did you mean 'model'"):
        build_rewards([{"rewards_of_mine:Judge": {"modle": "b"}}], base_dir=tmp_path)


@pytest.mark.usefixtures("clean_registry")
def test_registering() -> None:
    @verifier(name="mine", reference=None)
    def mine(text: str, reference: None, *, size: int = 1) -> Verdict:
        return Verdict(float(len(text) == size), "size")

    register("mine", mine)
    register("mine", mine)  # a module may be imported twice
    register("factory", lambda size=2: mine(size=size))
    assert build_rewards([{"mine": {"size": 3}}, {"factory": {"size": 4}}]).functions[1].options == {"size": 4}
    assert {"mine", "factory", "math"} <= set(registry.names())
    for taken in ("math", "factory", "", "a:b"):
        with pytest.raises(ConfigurationError, match="cannot register"):
            register(taken, mine)


def test_other_packages_add_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("theirs", "trl_grpo_ext.rewards.verifiers.exact:exact", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"theirs": point})
    assert "theirs" in registry.names()
    assert build_rewards([{"theirs": {"ignore_case": True}}]).functions[0].options["ignore_case"] is True


@pytest.mark.parametrize(
    ("wanted", "distinct"),
    [
        (["<lambda>", "<lambda>"], ["<lambda>", "<lambda>_2"]),
        (["a", "b", "a", "a"], ["a", "b", "a_2", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_3", "a_2"]),
        ([], []),
    ],
)
def test_names_are_made_distinct(wanted: list[str], distinct: list[str]) -> None:
    assert unique_names(wanted) == distinct
    assert unique_names(distinct) == distinct


def test_columns_are_read_from_the_signature() -> None:
    class Object:
        def __call__(self, prompts: Any, completions: Any, topic: Any, **kwargs: Any) -> list[float]:
            return []

    async def judged(completions: Any, gold: Any, *, trainer_state: Any, log_extra: Any) -> list[float]:
        return []

    assert required_columns(plain) == ("gold",)
    assert required_columns(functools.partial(plain, gold=["x"])) == ()
    assert required_columns(Object()) == ("topic",)
    assert required_columns(judged) == ("gold",)
    assert required_columns(lambda completions, **kwargs: []) == ()
    assert required_columns("organisation/reward-model") == ()


def test_building_rewards_imports_no_torch() -> None:
    code = (
        "import sys; from trl_grpo_ext.rewards.registry import build_rewards; build_rewards(['exact', 'numeric']); "
        "bad = {'torch', 'trl', 'transformers', 'numpy', 'sympy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_parts_of_a_combination_are_found_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "part_of_mine.py").write_text("def part(completions, **kw): return [2.0] * len(completions)\n")
    parts = ["part_of_mine.py:part", "exact"]
    rewards = build_rewards([{"combine": {"parts": parts, "name": "both"}}, "exact"], base_dir=tmp_path)
    assert rewards.names == ["both", "exact"]
    assert rewards.columns == {"both": ("answer",), "exact": ("answer",)}
    columns: list[str] = []
    scores = rewards.functions[0](completions=["a"], answer=["a"], log_extra=lambda name, _: columns.append(name))
    assert scores == [3.0]
    assert columns == ["both/part", "both/exact"]
