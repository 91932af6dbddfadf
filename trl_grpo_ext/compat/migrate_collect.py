"""First look at a script: which names it imports from TRL, which variables hold trainers, which era it is from."""

# ruff: noqa: N802 (libcst finds visitors by the names of its node classes)
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import libcst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper

from trl_grpo_ext.compat.fields import CLASSIC_ONLY
from trl_grpo_ext.compat.migrate_rules import CONFIGS, MOVED, TRAINERS, V2_SIGNS

# A script that was migrated before: its names are known, and stay as they are.
_ALREADY_MOVED = {place: old for old, place in MOVED.items()}


@dataclass
class Facts:
    """What is known before anything is changed.

    Attributes:
        local_names: Local name -> original TRL name, for names imported from TRL that move.
        trl_aliases: Local names of the module ``trl`` itself.
        trainer_classes: Classes of the script that derive from a trainer.
        trainer_variables: Names that a trainer is assigned to.
        era: "classic", "v2" or "grpo".
        uses: How often each name is read or written.
    """

    local_names: dict[str, str] = field(default_factory=dict)
    trl_aliases: set[str] = field(default_factory=set)
    trainer_classes: set[str] = field(default_factory=set)
    trainer_variables: set[str] = field(default_factory=set)
    era: str = "v2"
    uses: Counter[str] = field(default_factory=Counter)

    def makes_trainer(self, call: libcst.Call) -> bool:
        """Return whether ``call`` constructs a trainer or a subclass of one."""
        own = isinstance(call.func, libcst.Name) and call.func.value in self.trainer_classes
        return own or self.original(call.func) in TRAINERS

    def original(self, node: Any) -> str | None:
        """Return the TRL name that an expression stands for, or None."""
        if isinstance(node, libcst.Name):
            return self.local_names.get(node.value)
        if (
            isinstance(node, libcst.Attribute)
            and isinstance(node.value, libcst.Name)
            and node.value.value in self.trl_aliases
            and node.attr.value in MOVED
        ):
            return node.attr.value
        return None


def collect(wrapper: MetadataWrapper) -> Facts:
    """Return the facts about a parsed script."""
    facts = Facts()
    wrapper.visit(_Imports(facts))
    look = _Uses(facts)
    wrapper.visit(look)
    facts.era = look.era()
    return facts


def dotted(node: Any) -> str:
    """Return the dotted name that ``node`` spells, or an empty string."""
    if isinstance(node, libcst.Name):
        return node.value
    if isinstance(node, libcst.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr.value}" if left else ""
    return ""


class _Imports(libcst.CSTVisitor):
    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def visit_ImportFrom(self, node: libcst.ImportFrom) -> None:
        module = dotted(node.module)
        if isinstance(node.names, libcst.ImportStar):
            return
        for alias in node.names:
            name = dotted(alias.name)
            old = name if module.split(".")[0] == "trl" else _ALREADY_MOVED.get((module, name))
            if old in MOVED:
                self.facts.local_names[alias.evaluated_alias or name] = old

    def visit_Import(self, node: libcst.Import) -> None:
        for alias in node.names:
            if dotted(alias.name) == "trl":
                self.facts.trl_aliases.add(alias.evaluated_alias or "trl")


class _Uses(libcst.CSTVisitor):
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.keywords: set[str] = set()
        self.settings: set[str] = set()
        self.has_step = self.has_ppo = self.has_grpo = False

    def era(self) -> str:
        """Return the era: GRPO if only its trainer occurs, classic if a trainer is stepped or a setting says so."""
        if self.has_grpo and not self.has_ppo:
            return "grpo"
        if self.keywords & V2_SIGNS:
            return "v2"
        return "classic" if self.has_step or self.settings & CLASSIC_ONLY else "v2"

    def visit_Name(self, node: libcst.Name) -> None:
        self.facts.uses[node.value] += 1

    def visit_ClassDef(self, node: libcst.ClassDef) -> None:
        originals = {self.facts.original(base.value) for base in node.bases}
        if originals & TRAINERS:
            self.has_grpo |= "GRPOTrainer" in originals
            self.has_ppo |= bool(originals & (TRAINERS - {"GRPOTrainer"}))
            self.facts.trainer_classes.add(node.name.value)

    def visit_Call(self, node: libcst.Call) -> None:
        original = self.facts.original(node.func)
        if self.facts.makes_trainer(node):
            self.has_grpo |= original == "GRPOTrainer"
            self.has_ppo |= original in TRAINERS and original != "GRPOTrainer"
            self.keywords |= {arg.keyword.value for arg in node.args if arg.keyword is not None}
        elif original in CONFIGS and original != "GRPOConfig":
            self.has_ppo = True
            self.settings |= {arg.keyword.value for arg in node.args if arg.keyword is not None}
        if isinstance(node.func, libcst.Attribute) and node.func.attr.value == "step" and len(node.args) >= 3:
            self.has_step = True

    def visit_Assign(self, node: libcst.Assign) -> None:
        if isinstance(node.value, libcst.Call) and self.facts.makes_trainer(node.value):
            for target in node.targets:
                if m.matches(target.target, m.Name()):
                    self.facts.trainer_variables.add(dotted(target.target))
