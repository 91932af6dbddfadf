"""Does the chat template say to the model what the data say?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trl_grpo_ext.preflight.report import Answer

QUESTION = "chat template"


def check_template(
    tokenizer: Any, prompts: Sequence[Any], template_kwargs: Mapping[str, Any] | None = None
) -> list[Answer]:
    """Return one answer per fault found in the rendered prompts, worst first, or one green answer.

    Looked for: a template that refuses a role, turns that do not reach the model, the text "None" that no turn has,
    a missing generation header, a doubled or missing BOS, a prefilled answer that the template closes.

    Args:
        tokenizer: with a template where prompts are chats.
        prompts: some of the data's, chats or strings.
        template_kwargs: further keywords of the template.
    """
    kwargs = dict(template_kwargs or {})
    found: dict[str, Answer] = {}
    for prompt in prompts:
        for answer in _faults(tokenizer, prompt, kwargs):
            found.setdefault(answer.finding.split(":")[0], answer)
    if found:
        return sorted(found.values(), key=lambda answer: answer.colour != "red")
    return [Answer(QUESTION, "green", f"{len(prompts)} prompts render: {_ending(tokenizer, prompts, kwargs)}")]


def _faults(tokenizer: Any, prompt: Any, kwargs: Mapping[str, Any]) -> list[Answer]:
    if isinstance(prompt, str):
        return _bos_faults(tokenizer, list(tokenizer(prompt)["input_ids"]), is_text=True)
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **kwargs)
        bare = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=False, **kwargs)
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **kwargs)
    except Exception as error:  # templates raise whatever their author wrote
        roles = ", ".join(str(turn.get("role")) for turn in prompt)
        return [
            Answer(
                QUESTION,
                "red",
                f"it refuses turns of {roles}: {error}",
                "Put the system text into the user's turn (data.system: null and a data.prompt template), or give "
                "another chat_template",
            )
        ]
    return [
        *_content_faults(prompt, text),
        *_header_faults(prompt, text, bare),
        *_bos_faults(tokenizer, list(ids), is_text=False),
    ]


def _content_faults(prompt: Sequence[Mapping[str, Any]], text: str) -> list[Answer]:
    """Return faults in what the turns became."""
    faults = []
    parts = [(str(turn.get("role")), _text_of(turn.get("content"))) for turn in prompt]
    for role, content in parts:
        # Templates may strip and re-wrap white space, and drop the reasoning of earlier answers.
        if role in ("system", "developer", "user") and "".join(content.split()) not in "".join(text.split()):
            faults.append(
                Answer(
                    QUESTION,
                    "red",
                    f"the {role} turn does not reach the model: {content[:60]!r} is not in the rendered prompt",
                    "Put its text into another turn, or give a chat_template that renders this role",
                )
            )
    if "None" in text and not any("None" in content for _, content in parts):
        faults.append(
            Answer(
                QUESTION,
                "red",
                'the rendered prompt says "None": a turn or a variable of the template is empty',
                "Look at the first prompt that trl-grpo check prints; fill the column, or leave the turn out",
            )
        )
    return faults


def _header_faults(prompt: Sequence[Mapping[str, Any]], text: str, bare: str) -> list[Answer]:
    """Return faults in how the rendered prompt ends."""
    if prompt and prompt[-1].get("role") == "assistant":
        prefill = _text_of(prompt[-1].get("content"))
        if not text.rstrip().endswith(prefill.rstrip()):
            return [
                Answer(
                    QUESTION,
                    "yellow",
                    f"a prefilled answer is not continued: after {prefill[-30:]!r} the template closes the turn and "
                    "the model begins a new one",
                    "Leave the assistant's turn out and ask for the form in the prompt",
                )
            ]
        return []
    if text == bare:
        return [
            Answer(
                QUESTION,
                "red",
                f"no generation header: the prompt ends with {text[-30:]!r}, so that the model goes on with the "
                "user's turn",
                "Give a chat_template that writes the assistant's header when add_generation_prompt is set",
            )
        ]
    return []


def _bos_faults(tokenizer: Any, ids: list[int], *, is_text: bool) -> list[Answer]:
    """Return a fault unless BOS stands at the start once, or is not used at all."""
    bos = tokenizer.bos_token_id
    if bos is None or not ids:
        return []
    if ids[:2] == [bos, bos]:
        source = "the prompts contain it already" if is_text else "the template writes it twice"
        return [Answer(QUESTION, "yellow", f"two BOS tokens: {source}. The trainer keeps one", "")]
    wants_bos = list(tokenizer("a")["input_ids"])[:1] == [bos]
    if wants_bos and ids[0] != bos:
        return [
            Answer(
                QUESTION,
                "yellow",
                f"no BOS: the tokenizer puts {tokenizer.bos_token!r} before plain text, the template does not",
                "Compare with the model's card; most models trained with BOS need it",
            )
        ]
    return []


def _ending(tokenizer: Any, prompts: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if not chats:
        return "plain text, no template"
    text = tokenizer.apply_chat_template(chats[0], tokenize=False, add_generation_prompt=True, **kwargs)
    return f"every turn is there, the header {text[-24:]!r} ends them"


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else str(content)
