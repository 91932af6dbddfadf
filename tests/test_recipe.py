"""Recipes: what is read, what the defaults are, and that the static field names are the real ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.recipe import load_recipe, parse_recipe
from trl_grpo_ext.recipe_yaml import apply_overrides, parse_yaml
from trl_grpo_ext.source_fields import allowed_types, class_fields, fits, lora_fields, trainer_fields

RAW = {"model": "org/name", "data": {"hub": "org/data", "prompt": "q"}, "rewards": ["exact"]}


def test_static_trainer_fields_are_those_of_the_class() -> None:
    """The names, and the defaults that the step arithmetic uses, read from source = the imported dataclass."""
    from trl_grpo_ext import GroupRelativeConfig

    real = {field.name: field.default for field in dataclasses.fields(GroupRelativeConfig) if field.init}
    static = trainer_fields()
    assert set(static) == set(real)
    for name in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
        "generation_batch_size",
        "steps_per_generation",
        "learning_rate",
        "beta",
    ):
        assert static[name].default == real[name], name


def test_static_lora_fields_are_those_of_the_class() -> None:
    from peft import LoraConfig

    assert set(lora_fields()) == {field.name for field in dataclasses.fields(LoraConfig) if field.init}


def test_static_fields_follow_bases_imports_and_init_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text("class Base:\n    a: int = 1\n    b: float = field(default=2.0)\n")
    (package / "child.py").write_text(
        "from .base import Base as Parent\n"
        "class Child(Parent):\n    c: 'str | None' = None\n"
        "    hidden: int = field(init=False)\n    KIND: ClassVar[int] = 3\n"
        "    b: float = field(default=3.0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = class_fields("shop.child", "Child")
    assert {name: field.default for name, field in fields.items()} == {"a": 1, "b": 3.0, "c": None}


@pytest.mark.parametrize(
    ("annotation", "types"),
    [
        ("float | None", (int, float, type(None))),
        ("Optional[int]", (int, type(None))),
        ("dict[str, Any] | str | None", (dict, str, type(None))),
        ("list[float] | None", (list, type(None))),
        ("IntervalStrategy | str", None),
        ("Literal['a', 'b'] | None", None),
    ],
)
def test_allowed_types(annotation: str, types: tuple[type, ...] | None) -> None:
    assert allowed_types(annotation) == types


def test_a_boolean_is_no_number() -> None:
    assert not fits(True, "int")
    assert fits(True, "bool | int")
    assert fits(3, "float")
    assert not fits(3.5, "int")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5E3", 1500.0),
        ("-2e+3", -2000.0),
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("1_000", 1000),
        ("1.", 1.0),
        ("e4", "e4"),
        ("1e", "1e"),
        ("12:30:45", "12:30:45"),
        ("010", 10),
        ("0x1F", 31),
        ("2024-01-01", "2024-01-01"),
        ("-7", -7),
        (".inf", float("inf")),
        ("null", None),
        ("0.1.2", "0.1.2"),
        ("[1, 2e0]", [1, 2.0]),
    ],
)
def test_yaml_as_people_write_it(text: str, value: object) -> None:
    parsed = parse_yaml(text, "x")
    assert parsed == value
    assert type(parsed) is type(value)


def test_overrides() -> None:
    raw = {"trainer": None, "rewards": ["exact", {"math": {"weight": 1}}]}
    apply_overrides(
        raw, ["trainer.learning_rate=1e-4", "rewards.1.math.weight=2", "rewards.0=format", "peft={r: 4}", "a.b.c=x=y"]
    )
    assert raw == {
        "trainer": {"learning_rate": 1e-4},
        "rewards": ["format", {"math": {"weight": 2}}],
        "peft": {"r": 4},
        "a": {"b": {"c": "x=y"}},
    }


def test_defaults() -> None:
    recipe = parse_recipe(RAW, Path("folder/demo.yaml"))
    assert recipe.name == "demo"
    assert recipe.peft is None
    assert recipe.data.split == "train"
    assert recipe.eval.strict == "exact"
    assert recipe.completions_per_step() == (8, 8)
    assert parse_recipe({**RAW, "peft": "lora"}, Path("r.yaml")).peft == {
        "task_type": "CAUSAL_LM",
        "target_modules": "all-linear",
        "lora_dropout": 0.0,
    }
    assert parse_recipe({**RAW, "peft": {"r": 4, "lora_dropout": 0.1}}, Path("r.yaml")).peft["lora_dropout"] == 0.1
    assert parse_recipe({**RAW, "peft": "none"}, Path("r.yaml")).peft is None
    assert parse_recipe({**RAW, "rewards": {"math": {"weight": 2}, "exact": None}}, Path("r.yaml")).rewards == [
        {"math": {"weight": 2}},
        {"exact": None},
    ]
    assert parse_recipe({**RAW, "trainer": {"scale_rewards": False}}, Path("r.yaml")).trainer["scale_rewards"] is False


@pytest.mark.parametrize(
    ("trainer", "num_processes", "expected"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}, 1, (24, 8)),
        ({"per_device_train_batch_size": 4, "num_generations": 4}, 3, (12, 4)),
        ({"generation_batch_size": 32, "num_generations": 4}, 1, (32, 4)),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_generations": 2}, 1, (24, 2)),
    ],
)
def test_completions_per_step_are_those_of_trl(
    trainer: dict[str, int], num_processes: int, expected: tuple[int, int]
) -> None:
    recipe = parse_recipe({**RAW, "trainer": {"num_generations": 8, **trainer}}, Path("r.yaml"))
    assert recipe.completions_per_step(num_processes) == expected
    if num_processes == 1:
        from trl_grpo_ext import GroupRelativeConfig

        args = GroupRelativeConfig("out", use_cpu=True, bf16=False, **{"num_generations": 8, **trainer})
        assert (args.generation_batch_size, args.num_generations) == expected


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("prompt,answer\na,b\n")
    (tmp_path / "r.yaml").write_text("model: m\ndata: {file: [d.csv]}\nrewards: exact\n")
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.data.files == (tmp_path.resolve() / "d.csv",)
    assert recipe.rewards == ["exact"]
    with pytest.raises(ConfigurationError, match=r"there is no file .*Did you mean 'd.csv'"):
        load_recipe(tmp_path / "r.yaml", ["data.file=dd.csv"])


def test_base_dir_moves_where_the_paths_of_a_recipe_start(tmp_path: Path) -> None:
    (tmp_path / "there" / "lora").mkdir(parents=True)
    (tmp_path / "there" / "rows.jsonl").touch()
    (tmp_path / "here").mkdir()
    raw = {"base_dir": "../there", "model": "m", "data": {"file": "rows.jsonl"}, "rewards": ["exact"]}
    recipe = parse_recipe({**raw, "trainer": {"adapter": "lora"}}, tmp_path / "here" / "r.yaml")
    assert recipe.base_dir == (tmp_path / "there").resolve()
    assert [path.resolve() for path in recipe.data.files] == [(tmp_path / "there" / "rows.jsonl").resolve()]
    assert Path(recipe.trainer["adapter"]).resolve() == (tmp_path / "there" / "lora").resolve()
    for wrong in ("../nowhere", "../there/rows.jsonl", 3):
        with pytest.raises(ConfigurationError, match=f"base_dir is {wrong!r}, and there is no such directory"):
            parse_recipe({**raw, "base_dir": wrong}, tmp_path / "here" / "r.yaml")


def test_memory_stands_beside_the_trainer_or_in_it(tmp_path: Path) -> None:
    assert parse_recipe({**RAW, "memory": "qlora"}, tmp_path / "r.yaml").trainer["memory"] == "qlora"
    inside = parse_recipe({**RAW, "trainer": {"memory": {"base": "nf4"}}}, tmp_path / "r.yaml")
    assert inside.trainer["memory"] == {"base": "nf4"}
    refused: list[tuple[dict, str]] = [
        ({"memory": "qlara"}, "memory='qlara' is none of auto, full"),
        ({"memory": {"bass": "nf4"}}, "'bass' is no field of MemoryMode"),
        ({"memory": 4}, "memory is 4; it must be a mode's name"),
        ({"memory": "lora", "trainer": {"memory": "full"}}, "memory is 'lora' and trainer.memory 'full'"),
        ({"memory": "full", "peft": {"r": 4}}, "memory: full trains every weight, but the recipe has a peft section"),
    ]
    for raw, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            parse_recipe({**RAW, **raw}, tmp_path / "r.yaml")


def test_an_adapter_is_looked_up_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    recipe = parse_recipe({**RAW, "trainer": {"adapter": "sft"}}, tmp_path / "r.yaml")
    assert recipe.trainer["adapter"] == str(tmp_path / "sft")
    assert parse_recipe({**RAW, "trainer": {"adapter": "org/sft"}}, tmp_path / "r.yaml").trainer["adapter"] == "org/sft"


def test_an_adapter_and_a_peft_section_are_refused_with_the_words_of_a_recipe(tmp_path: Path) -> None:
    raw = {**RAW, "trainer": {"adapter": "org/sft"}, "peft": {"r": 4}}
    with pytest.raises(
        ConfigurationError, match=r"trainer\.adapter is 'org/sft'.*remove the peft section \(--set peft=null"
    ):
        parse_recipe(raw, tmp_path / "r.yaml")
    assert parse_recipe({**raw, "peft": None}, tmp_path / "r.yaml").peft is None
