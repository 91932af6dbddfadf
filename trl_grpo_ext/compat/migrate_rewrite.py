"""The changes themselves: imports, names, keywords, and calls that transformers 5 no longer takes."""

# ruff: noqa: N802 (libcst finds visitors by the names of its node classes)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import PositionProvider

from trl_grpo_ext.compat.call import V2_ORDER
from trl_grpo_ext.compat.fields import DEAD_HOOKS
from trl_grpo_ext.compat.migrate_collect import Facts, dotted
from trl_grpo_ext.compat.migrate_rules import (
    CONFIGS,
    CRITIC_STATS,
    GONE_ATTRIBUTES,
    GONE_KEYWORDS,
    MOVED,
    TRAINER_DROPPED,
    TRAINER_KEYWORDS,
    TRAINERS,
    config_keyword,
    trl_has,
)

_WRAPPER = "AutoModelForCausalLMWithValueHead"


class Rewriter(libcst.CSTTransformer):
    """Change a script according to the rules; ``remarks`` collects (line, text) for what it leaves to a person."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        self.remarks: list[tuple[int, str]] = []
        self.needed_imports: list[tuple[str, str]] = []
        self._in_import = 0

    def remark(self, node: Any, text: str) -> None:
        """Note ``text`` for the line of ``node`` in the old script."""
        self.remarks.append((self.get_metadata(PositionProvider, node).start.line, text))

    def with_needed_imports(self, module: libcst.Module) -> libcst.Module:
        """Return ``module`` with imports for the names that the changes brought in."""
        context = CodemodContext()
        for home, name in dict.fromkeys(self.needed_imports):
            AddImportsVisitor.add_needed_import(context, home, name)
        return AddImportsVisitor(context).transform_module(module) if self.needed_imports else module

    # --- imports

    def visit_ImportFrom(self, node: libcst.ImportFrom) -> None:
        self._in_import += 1

    def leave_ImportFrom(self, original_node: libcst.ImportFrom, updated_node: libcst.ImportFrom) -> Any:
        self._in_import -= 1
        return updated_node

    def visit_Import(self, node: libcst.Import) -> None:
        self._in_import += 1
        for alias in node.names:
            name = dotted(alias.name)
            if name.startswith("trl.") and not trl_has(name):
                self.remark(node, f"the installed TRL has no module {name}")

    def leave_Import(self, original_node: libcst.Import, updated_node: libcst.Import) -> Any:
        self._in_import -= 1
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: libcst.SimpleStatementLine, updated_node: libcst.SimpleStatementLine
    ) -> Any:
        statement = original_node.body[0]
        if len(original_node.body) != 1 or not isinstance(statement, libcst.ImportFrom):
            return updated_node
        module = dotted(statement.module)
        if module.split(".")[0] != "trl":
            return updated_node
        if isinstance(statement.names, libcst.ImportStar):
            self.remark(statement, f"from {module} import *: name what the script uses, so that it can be moved")
            return updated_node
        return self._split_import(statement, module, updated_node)

    def _split_import(
        self, statement: libcst.ImportFrom, module: str, line: libcst.SimpleStatementLine
    ) -> libcst.SimpleStatementLine | libcst.FlattenSentinel:
        """Return one line per new home of the imported names; the first keeps the comments above."""
        assert not isinstance(statement.names, libcst.ImportStar)
        homes: dict[str, list[str]] = {}
        for alias in statement.names:
            name, local = dotted(alias.name), alias.evaluated_alias
            home, new = MOVED.get(name, (module, name))
            if home == module and not trl_has(module, name):
                self.remark(statement, f"the installed TRL has no {name} in {module}")
            entry = f"{new} as {local}" if local and local != new else new
            if entry not in homes.setdefault(home, []):
                homes[home].append(entry)
        if list(homes) == [module]:
            return line
        order = sorted(homes, key=lambda home: (home.startswith("trl_grpo_ext"), home))
        statements = [_import_line(home, homes[home]) for home in order]
        first = statements[0].with_changes(leading_lines=line.leading_lines)
        last = statements[-1].with_changes(trailing_whitespace=line.trailing_whitespace)
        if len(statements) == 1:
            return first.with_changes(trailing_whitespace=line.trailing_whitespace)
        return libcst.FlattenSentinel([first, *statements[1:-1], last])

    # --- names

    def leave_Name(self, original_node: libcst.Name, updated_node: libcst.Name) -> Any:
        original = self.facts.local_names.get(original_node.value)
        if self._in_import or original is None or original != original_node.value:
            return updated_node
        return updated_node.with_changes(value=MOVED[original][1])

    def leave_Arg(self, original_node: libcst.Arg, updated_node: libcst.Arg) -> libcst.Arg:
        if original_node.keyword is None:  # a keyword is no use of the imported name
            return updated_node
        return updated_node.with_changes(keyword=original_node.keyword)

    def visit_Attribute(self, node: libcst.Attribute) -> None:
        holder = dotted(node.value)
        of_model = node.attr.value in ("v_head", "compute_reward_score")
        if node.attr.value in GONE_ATTRIBUTES and (of_model or holder in self.facts.trainer_variables):
            self.remark(node, f".{node.attr.value}: {GONE_ATTRIBUTES[node.attr.value]}")
        if node.attr.value == "value_model" and holder in self.facts.trainer_variables:
            self.remark(node, ".value_model is None: there is no critic")

    def leave_Attribute(self, original_node: libcst.Attribute, updated_node: libcst.Attribute) -> Any:
        original = self.facts.original(original_node)
        if original is None or self._in_import:
            # an attribute of that name is not the imported name
            return updated_node.with_changes(attr=original_node.attr)
        home, name = MOVED[original]
        self.needed_imports.append((home, name))
        return libcst.Name(name)

    def visit_ClassDef(self, node: libcst.ClassDef) -> None:
        if not any(self.facts.original(base.value) in TRAINERS for base in node.bases):
            return
        body = node.body.body if isinstance(node.body, libcst.IndentedBlock) else []
        for item in body:
            if isinstance(item, libcst.FunctionDef) and item.name.value in DEAD_HOOKS:
                self.remark(
                    item,
                    f"{node.name.value}.{item.name.value} overrides a method that is never called; override "
                    "_calculate_rewards or _compute_loss",
                )

    def visit_Assign(self, node: libcst.Assign) -> None:
        for target in node.targets:
            attribute = target.target
            if isinstance(attribute, libcst.Attribute) and self.facts.original(attribute.value) in TRAINERS:
                self.remark(
                    node, f"{dotted(attribute)} = ...: a method of the old trainer is replaced; subclass instead"
                )

    def visit_SimpleString(self, node: libcst.SimpleString) -> None:
        text = node.raw_value
        if CRITIC_STATS.match(text):
            self.remark(node, f"{text!r} came from the critic: it is NaN in what step() returns, and not logged")

    # --- calls

    def leave_Call(self, original_node: libcst.Call, updated_node: libcst.Call) -> Any:
        original = self.facts.original(original_node.func)
        if self.facts.makes_trainer(original_node):
            return self._trainer_call(original_node, updated_node)
        if original in CONFIGS:
            return self._config_call(original_node, updated_node, original or "")
        if original == "AutoModelForSeq2SeqLMWithValueHead" or self._holder(original_node) == (
            "AutoModelForSeq2SeqLMWithValueHead"
        ):
            self.remark(original_node, "seq2seq models cannot be trained here; the last TRL that could is 1.12")
            return updated_node
        name = original_node.func.attr.value if isinstance(original_node.func, libcst.Attribute) else ""
        if name == "from_pretrained":
            return self._from_pretrained(original_node, updated_node)
        if name == "apply_chat_template":
            return self._chat_template(updated_node)
        if dotted(original_node.func) == "pipeline":
            return _changed_arguments(updated_node, {"return_all_scores": _top_k})
        return updated_node

    def _holder(self, node: libcst.Call) -> str | None:
        return self.facts.original(node.func.value) if isinstance(node.func, libcst.Attribute) else None

    def _trainer_call(self, original: libcst.Call, call: libcst.Call) -> libcst.Call:
        if any(arg.star for arg in original.args):
            self.remark(original, "keywords in * or ** of the trainer call are not looked at")
        if self.facts.era != "v2":
            return call
        arguments = []
        for position, arg in enumerate(call.args):
            name = arg.keyword.value if arg.keyword is not None else ""
            by_position = not name and not arg.star and position == V2_ORDER.index("value_model")
            if (name in TRAINER_DROPPED or by_position) and dotted(arg.value) not in ("", "None"):
                self.remark(
                    original, f"{dotted(arg.value)} is not passed on: delete where it is loaded, to save its memory"
                )
            if name in TRAINER_DROPPED:
                continue
            if by_position:
                arg = arg.with_changes(value=libcst.Name("None"))
            if name in TRAINER_KEYWORDS and not _has_keyword(call, TRAINER_KEYWORDS[name]):
                arg = arg.with_changes(keyword=libcst.Name(TRAINER_KEYWORDS[name]))
            arguments.append(arg)
        return _with_arguments(call, arguments)

    def _config_call(self, original: libcst.Call, call: libcst.Call, name: str) -> libcst.Call:
        era = "grpo" if name == "GRPOConfig" else self.facts.era
        if any(arg.star for arg in original.args):
            self.remark(original, f"keywords in * or ** of {name} are not looked at")
        arguments = []
        for arg in call.args:
            if arg.keyword is None:
                arguments.append(arg)
                continue
            value = libcst.Module(body=[]).code_for_node(arg.value)
            rule = config_keyword(arg.keyword.value, value, era)
            if rule.remark:
                self.remark(original, rule.remark)
            if rule.name is not None and not (rule.name != arg.keyword.value and _has_keyword(call, rule.name)):
                arguments.append(arg.with_changes(keyword=libcst.Name(rule.name)))
                if rule.added is not None and not _has_keyword(call, rule.added[0]):
                    arguments[-1:] = _beside(call, arg, *rule.added)
        return _with_arguments(call, arguments)

    def _from_pretrained(self, original: libcst.Call, call: libcst.Call) -> libcst.Call:
        for arg in original.args:
            if arg.keyword is not None and arg.keyword.value in GONE_KEYWORDS:
                self.remark(original, f"{arg.keyword.value}: {GONE_KEYWORDS[arg.keyword.value]}")
        call = _changed_arguments(call, {"use_auth_token": lambda arg: arg.with_changes(keyword=libcst.Name("token"))})
        bits = [a for a in call.args if a.keyword is not None and a.keyword.value in ("load_in_8bit", "load_in_4bit")]
        if not bits or self._holder(original) == _WRAPPER or _has_keyword(call, "quantization_config"):
            return call
        self.needed_imports.append(("transformers", "BitsAndBytesConfig"))
        inside = ", ".join(
            libcst.Module(body=[]).code_for_node(a.with_changes(comma=libcst.MaybeSentinel.DEFAULT)).strip()
            for a in bits
        )
        value = libcst.parse_expression(f"BitsAndBytesConfig({inside})")
        arguments: list[libcst.Arg] = []
        for arg in call.args:
            if arg is bits[0]:
                arguments.append(arg.with_changes(keyword=libcst.Name("quantization_config"), value=value))
            elif arg not in bits:
                arguments.append(arg)
        return _with_arguments(call, arguments)

    def _chat_template(self, call: libcst.Call) -> libcst.Call:
        """Ask for ids, which ``apply_chat_template`` returned by default before transformers 5."""
        tokenizes = next((a.value for a in call.args if a.keyword is not None and a.keyword.value == "tokenize"), None)
        if _has_keyword(call, "return_dict") or dotted(tokenizes) == "False" or any(arg.star for arg in call.args):
            return call
        added = libcst.parse_expression("f(return_dict=False)")
        assert isinstance(added, libcst.Call)
        if not call.args:
            return call.with_changes(args=added.args)
        last = call.args[-1]
        separator = libcst.Comma(whitespace_after=libcst.SimpleWhitespace(" "))
        if isinstance(last.comma, libcst.Comma):  # a trailing comma: the new argument takes its place
            before = call.args[-2].comma if len(call.args) > 1 else separator
            new = added.args[0].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
            return call.with_changes(args=[*call.args[:-1], last.with_changes(comma=before), new])
        return call.with_changes(
            args=[
                *call.args[:-1],
                last.with_changes(comma=separator, whitespace_after_arg=libcst.SimpleWhitespace("")),
                added.args[0].with_changes(whitespace_after_arg=last.whitespace_after_arg),
            ]
        )

    def leave_DictElement(self, original_node: libcst.DictElement, updated_node: libcst.DictElement) -> Any:
        """Turn ``{"return_all_scores": True}``, as pipeline scripts keep it, into what pipelines take today."""
        key, is_true = original_node.key, dotted(original_node.value) == "True"
        if not isinstance(key, libcst.SimpleString) or key.raw_value != "return_all_scores" or not is_true:
            return updated_node
        key = key.with_changes(value=f"{key.quote}top_k{key.quote}")
        return updated_node.with_changes(key=key, value=libcst.Name("None"))


def _top_k(arg: libcst.Arg) -> libcst.Arg:
    return (
        arg.with_changes(keyword=libcst.Name("top_k"), value=libcst.Name("None"))
        if dotted(arg.value) == "True"
        else arg
    )


def _changed_arguments(call: libcst.Call, changes: dict[str, Any]) -> libcst.Call:
    arguments = [
        changes[arg.keyword.value](arg) if arg.keyword is not None and arg.keyword.value in changes else arg
        for arg in call.args
    ]
    return call.with_changes(args=arguments)


def _has_keyword(call: libcst.Call, name: str) -> bool:
    return any(arg.keyword is not None and arg.keyword.value == name for arg in call.args)


def _with_arguments(call: libcst.Call, arguments: Sequence[libcst.Arg]) -> libcst.Call:
    """Return ``call`` with ``arguments``; the last keeps the comma and the line break of the old last one."""
    if arguments and call.args and arguments[-1] is not call.args[-1]:
        old = call.args[-1]
        last = arguments[-1].with_changes(comma=old.comma, whitespace_after_arg=old.whitespace_after_arg)
        arguments = [*arguments[:-1], last]
    return call.with_changes(args=arguments)


def _beside(call: libcst.Call, arg: libcst.Arg, name: str, value: str) -> list[libcst.Arg]:
    """Return ``arg``, a keyword argument of ``call``, and ``name=value`` after it, set apart like its neighbours."""
    added = arg.with_changes(keyword=libcst.Name(name), value=libcst.parse_expression(value))
    position = next(number for number, other in enumerate(call.args) if other is arg)
    if position < len(call.args) - 1:
        return [arg, added.with_changes(comma=_without_comment(arg.comma))]
    # The last one keeps what closes the call; the comma between the two is copied from the one before them.
    comma = call.args[position - 1].comma if position else None
    return [
        arg.with_changes(comma=_without_comment(comma), whitespace_after_arg=libcst.SimpleWhitespace("")),
        added,
    ]


def _without_comment(comma: Any) -> libcst.Comma:
    """Return a copy of a comma and of the white space after it, or a plain one where there is none."""
    if not isinstance(comma, libcst.Comma):
        return libcst.Comma(whitespace_after=libcst.SimpleWhitespace(" "))
    space = comma.whitespace_after
    if isinstance(space, libcst.ParenthesizedWhitespace):
        space = space.with_changes(first_line=libcst.TrailingWhitespace(), empty_lines=[])
    return comma.with_changes(whitespace_after=space)


def _import_line(module: str, entries: Sequence[str]) -> libcst.SimpleStatementLine:
    text = f"from {module} import {', '.join(entries)}\n"
    if len(text) > 110:
        text = f"from {module} import (\n" + "".join(f"    {entry},\n" for entry in entries) + ")\n"
    parsed = libcst.parse_statement(text)
    assert isinstance(parsed, libcst.SimpleStatementLine)
    return parsed
