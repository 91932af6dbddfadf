"""A memory mode becomes dtype, quantisation, adapter and settings; what the user wrote wins or is contradicted."""

from __future__ import annotations

import copy
import importlib.machinery
import logging
import pickle
import re
import shlex
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from runs import checkpoint, fresh_lora, make, trainable_dtypes
from tiny import tiny_model, tiny_prompts, tiny_tokenizer
from transformers import BitsAndBytesConfig
from trl import GRPOConfig, TrlParser

from trl_grpo_ext import GroupRelativeConfig
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.allocator import request_expandable_segments
from trl_grpo_ext.memory.auto import choose_mode
from trl_grpo_ext.memory.mode import NAMED_MODES, MemoryMode, asked_fields, named_mode
from trl_grpo_ext.memory.modes import base_dtype, config_changes
from trl_grpo_ext.policy.card import longest_prompt, planner_for_card
from trl_grpo_ext.written import written_settings

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "mistral")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("memory", list(NAMED_MODES))
def test_every_mode_trains_every_family(memory: str, family: str, tmp_path: Path) -> None:
    name = checkpoint(tmp_path / "base", kind=family)
    trainer = make(tmp_path, name, memory=memory, max_steps=1)
    mode = NAMED_MODES[memory]
    model = trainer.model.get_base_model() if mode.tuning == "lora" else trainer.model
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16
    stored = {"nf4": torch.uint8, "int8": torch.int8}.get(mode.base, torch.bfloat16)
    projection = model.model.layers[0].mlp.up_proj
    assert getattr(projection, "base_layer", projection).weight.dtype == stored
    assert trainable_dtypes(trainer) == {torch.bfloat16 if memory == "full" else torch.float32}
    assert trainer.args.gradient_checkpointing is False  # the harness writes it, so the mode's suggestion loses
    assert trainer.args.optim == "adamw_torch_fused"
    assert trainer.memory_mode == mode
    trainer.train()
    assert trainer.state.log_history[0]["update/moved_entries"] > 0.3


def test_the_default_adapter_is_on_every_linear_layer_without_dropout(base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base, memory="lora")
    config = trainer.model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} == {
        name.rsplit(".", 1)[-1] for name in config.target_modules
    }


def test_nf4_is_quantised_twice_and_computes_in_the_dtype_of_the_run(base: str, tmp_path: Path) -> None:
    config = make(tmp_path, base, memory="qlora").model.get_base_model().config.quantization_config
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16


@pytest.mark.parametrize("memory", ["lora", "qlora", "qlora-8bit", "full"])
def test_fp16_leaves_no_bfloat16_and_nothing_that_the_scaler_refuses(memory: str, base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base, memory=memory, fp16=True)
    assert trainable_dtypes(trainer) == {torch.float32}
    assert torch.bfloat16 not in {p.dtype for p in trainer.model.parameters()}
    if memory == "qlora":
        stored = trainer.model.get_base_model().config.quantization_config
        assert stored.bnb_4bit_compute_dtype == torch.float16


def test_without_a_mode_trl_loads_float32_and_keeps_its_settings(base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.memory_mode is None


def test_the_keyword_and_the_setting_are_one(base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base, keywords={"memory": "lora"})
    assert trainer.memory_mode == NAMED_MODES["lora"]
    with pytest.raises(ConfigurationError, match="memory='lora' contradicts memory='qlora' of the configuration"):
        make(tmp_path, base, memory="qlora", keywords={"memory": "lora"})


def test_a_record_a_mapping_and_json_are_the_same(tmp_path: Path) -> None:
    record = MemoryMode(base="nf4", gradient_checkpointing=False)
    as_mapping = {"base": "nf4", "gradient_checkpointing": False}
    for memory in (record, as_mapping, '{"base": "nf4", "gradient_checkpointing": false}'):
        config = GroupRelativeConfig(output_dir=str(tmp_path), use_cpu=True, memory=memory)
        assert config.memory == as_mapping
        assert named_mode(config.memory) == record
        assert '"base": "nf4"' in config.to_json_string()


@pytest.mark.parametrize(("text", "memory"), [("qlora", "qlora"), ('{"base": "nf4"}', {"base": "nf4"})])
def test_trls_command_line_takes_a_mode(text: str, memory: Any, tmp_path: Path) -> None:
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--memory", text]
    (config,) = TrlParser((GroupRelativeConfig,)).parse_args_and_config(args=arguments)
    assert config.memory == memory
    assert written_settings(config, ["optim", "gradient_checkpointing"]) == {}  # a parser writes every field


def test_an_unknown_mode_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"memory='qlara' is none of auto, full, .* Did you mean 'qlora'"):
        GroupRelativeConfig(output_dir=str(tmp_path), memory="qlara")
    with pytest.raises(ConfigurationError, match=r"'bass' is no field of MemoryMode. Did you mean 'base'"):
        GroupRelativeConfig(output_dir=str(tmp_path), memory={"bass": "nf4"})
    with pytest.raises(ConfigurationError, match="a quantised weight has no gradient"):
        MemoryMode(tuning="full", base="nf4")


def test_a_second_trainer_with_the_same_configuration_sees_the_users_settings(base: str, tmp_path: Path) -> None:
    """The first trainer's mode must not look like the user's own choice to the second."""
    trainer = make(tmp_path, base, memory={"optim": "adamw_8bit"})
    args = trainer.args
    assert args.optim == "adamw_8bit"
    args.memory = {"optim": "adamw_torch_fused", "tuning": "full", "base": "float32"}
    again = type(trainer)(
        base, trainer.reward_funcs, args, trainer.train_dataset, processing_class=trainer.processing_class
    )
    assert again.args.optim == "adamw_torch_fused"
    assert trainable_dtypes(again) == {torch.float32}


def test_written_settings_are_told_from_defaults(tmp_path: Path) -> None:
    names = ["gradient_checkpointing", "optim", "max_tokens_per_micro_batch"]
    config = GroupRelativeConfig(output_dir=str(tmp_path), use_cpu=True, gradient_checkpointing=True)
    assert written_settings(config, names) == {"gradient_checkpointing": True}  # though it is the default
    config.optim = "sgd"
    for same in (config, copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert written_settings(same, names) == {"gradient_checkpointing": True, "optim": "sgd"}
    plain = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, gradient_checkpointing=False)
    assert written_settings(plain, names) == {"gradient_checkpointing": False}


def test_settings_win_over_what_a_mode_suggests_and_contradict_what_it_was_asked_for() -> None:
    written = {"optim": "adamw_torch", "gradient_checkpointing": False}
    mode = MemoryMode(optim="adamw_8bit", max_tokens_per_micro_batch=1000)
    changes = config_changes(mode, (), written, vllm_colocates=False)
    assert changes == {"max_tokens_per_micro_batch": 1000}
    with pytest.raises(ConfigurationError, match="optim='adamw_8bit' contradicts optim='adamw_torch'"):
        config_changes(mode, ("optim",), written, vllm_colocates=False)
    same = config_changes(mode, ("optim",), {"optim": "adamw_8bit"}, vllm_colocates=False)
    assert "optim" not in same


def test_vllm_levers_need_vllm() -> None:
    mode = MemoryMode(vllm_gpu_memory_utilization=0.4, vllm_enable_sleep_mode=True)
    with_vllm = config_changes(mode, asked_fields(mode), {}, vllm_colocates=True)
    assert (with_vllm["vllm_gpu_memory_utilization"], with_vllm["vllm_enable_sleep_mode"]) == (0.4, True)
    with pytest.raises(ConfigurationError, match=r"vllm_gpu_memory_utilization=0.4 needs vLLM beside the trainer"):
        config_changes(mode, asked_fields(mode), {}, vllm_colocates=False)
    assert "vllm_gpu_memory_utilization" not in config_changes(mode, (), {}, vllm_colocates=False)


def test_dtype_of_the_base() -> None:
    """Table: mode, what is asked, fp16, what is written -> dtype."""
    lora, full, nf4 = (NAMED_MODES[name] for name in ("lora", "full", "qlora"))
    explicit = MemoryMode(tuning="full", base="float32")
    table = [
        (lora, (), False, None, "bfloat16"),
        (lora, (), False, "auto", "bfloat16"),
        (lora, (), True, None, "float16"),
        (full, ("tuning",), False, None, "bfloat16"),
        (full, ("tuning",), True, None, "float32"),
        (lora, (), False, "float32", "float32"),
        (lora, (), False, torch.float16, "float16"),
        (nf4, ("base",), False, None, "bfloat16"),
        (nf4, ("base",), True, None, "float16"),
        (nf4, ("base",), False, "float32", "float32"),
        (explicit, ("tuning", "base"), False, None, "float32"),
    ]
    for mode, asked, fp16, written, expected in table:
        assert base_dtype(mode, asked, fp16=fp16, written=written) == expected, (mode, asked, fp16, written)


@pytest.mark.parametrize(
    ("fields", "keywords", "message"),
    [
        ({"memory": "full"}, {"peft_config": fresh_lora()}, "memory='full' trains every weight, but peft_config is"),
        ({"memory": "full", "adapter": "some/adapter"}, {}, "memory='full' trains every weight, but adapter is given"),
        (
            {"memory": "qlora"},
            {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
            r"memory='qlora' \(base='nf4'\) contradicts quantization_config, which stores the base in 8 bits",
        ),
        (
            {"memory": "lora"},
            {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
            r"memory='lora' \(base='bfloat16'\) contradicts quantization_config, which stores the base in 4 bits",
        ),
        (
            {"memory": {"base": "bfloat16"}, "model_init_kwargs": {"dtype": "float32"}},
            {},
            "base='bfloat16' contradicts model_init_kwargs dtype='float32'",
        ),
        ({"memory": {"optim": "adamw_8bit"}, "optim": "sgd"}, {}, "optim='adamw_8bit' contradicts optim='sgd'"),
        (
            {"memory": {"gradient_checkpointing": True}, "gradient_checkpointing": False},
            {},
            "gradient_checkpointing=True contradicts gradient_checkpointing=False",
        ),
        (
            {"memory": "full", "fp16": True, "model_init_kwargs": {"dtype": "bfloat16"}},
            {},
            "dtype='bfloat16' cannot be trained in full with fp16=True",
        ),
        ({"memory": {"activation_offload": True}}, {}, "where they are already on a CPU"),
        (
            {"memory": {"vllm_gpu_memory_utilization": 0.3}},
            {},
            r"vllm_gpu_memory_utilization=0.3 needs vLLM beside the trainer",
        ),
    ],
)
def test_contradictions_name_both_sides(
    fields: dict[str, Any], keywords: dict[str, Any], message: str, base: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(tmp_path, base, **fields, **keywords)


def test_a_loaded_model_must_be_stored_as_the_mode_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="contradicts the model, which is loaded already and not quantised"):
        make(tmp_path, tiny_model(), memory="qlora")
    trainer = make(tmp_path, tiny_model(), memory="lora")  # its dtype is the user's choice
    assert trainer.model.get_base_model().dtype == torch.float32


def test_the_users_own_quantisation_of_the_same_kind_is_kept(base: str, tmp_path: Path) -> None:
    own = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)
    trainer = make(tmp_path, base, memory="qlora", quantization_config=own)
    assert trainer.model.get_base_model().config.quantization_config.bnb_4bit_quant_type == "fp4"


def test_bitsandbytes_is_asked_for_by_name(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_grpo_ext.memory import modes

    monkeypatch.setattr(modes.importlib.util, "find_spec", lambda _name: None)
    pip = re.escape(f"{shlex.quote(sys.executable)} -m pip install")
    with pytest.raises(ImportError, match=rf"base='nf4' needs bitsandbytes.*run: {pip} 'trl-grpo-ext\[qlora\]'$"):
        make(tmp_path, base, memory="qlora")
    with pytest.raises(ImportError, match="optim='adamw_8bit' needs bitsandbytes"):
        make(tmp_path, base, memory={"optim": "adamw_8bit"})


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit"])
def test_eight_bit_optimisers_train(optim: str, base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base, memory={"optim": optim}, max_steps=1)
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "AdamW"
    assert trainer.optimizer.optimizer.args.optim_bits == 8


class Plan:
    """Stands in for a ``MemoryPlan``."""

    mode = MemoryMode(base="nf4", max_tokens_per_micro_batch=2048)

    def __init__(self, fits: str) -> None:
        self.fits = fits

    def explain(self) -> str:
        return "It needs 30 GiB of 24."


def test_auto_follows_the_plan_and_refuses_what_does_not_fit() -> None:
    assert choose_mode(has_adapter=True, plan=lambda: Plan("yes")).mode == Plan.mode
    assert "without certainty" in choose_mode(has_adapter=True, plan=lambda: Plan("uncertain")).reason
    with pytest.raises(ConfigurationError, match=r"does not fit this card\. It needs 30 GiB of 24"):
        choose_mode(has_adapter=True, plan=lambda: Plan("no"))


def test_a_plan_stands_for_its_mode(base: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, base, keywords={"memory": Plan("yes")}, max_tokens_per_micro_batch=2048)
    assert trainer.memory_mode == Plan.mode
    assert trainer.model.get_base_model().is_loaded_in_4bit
    with pytest.raises(ConfigurationError, match=r"micro_batch=2048 contradicts max_tokens_per_micro_batch=512"):
        make(tmp_path, base, keywords={"memory": Plan("yes")}, max_tokens_per_micro_batch=512)


def test_auto_without_a_card_keeps_the_tuning_and_says_so(
    base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make(tmp_path, base, memory="auto", peft_config=fresh_lora())
    assert trainer.memory_mode == NAMED_MODES["lora"]
    assert "because an adapter is given and there is no card to plan for" in caplog.text
    assert make(tmp_path, base, memory="auto").memory_mode == NAMED_MODES["full"]


def test_expandable_segments() -> None:
    def ask(environ: dict[str, str], **how: Any) -> str | None:
        fields = {"older_name": False, "cuda_started": False, "set_now": None, **how}
        return request_expandable_segments(environ, **fields)

    fresh: dict[str, str] = {}
    assert ask(fresh) is None
    assert fresh == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    older: dict[str, str] = {}
    ask(older, older_name=True)
    assert older == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    others = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    ask(others)
    assert others == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}
    chosen = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert ask(chosen, cuda_started=True) is None
    assert chosen == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}


def test_expandable_segments_of_a_running_allocator() -> None:
    told: list[str] = []
    environ = {"PYTORCH_ALLOC_CONF": "backend:native"}
    assert request_expandable_segments(environ, older_name=False, cuda_started=True, set_now=told.append) is None
    assert told == [environ["PYTORCH_ALLOC_CONF"]] == ["backend:native,expandable_segments:True"]
    late: dict[str, str] = {}
    advice = request_expandable_segments(late, older_name=False, cuda_started=True, set_now=None)
    assert "Too late for expandable segments" in str(advice)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in str(advice)
    assert late == {}


def test_the_planner_is_asked_with_the_card_and_the_longest_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def plan_memory(model: Any, args: Any, peft_config: Any, **how: Any) -> Plan:
        asked.update(model=model, peft_config=peft_config, **how)
        return Plan("yes")

    planner = types.ModuleType("trl_grpo_ext.memory.plan")
    planner.plan_memory = plan_memory  # type: ignore[attr-defined]
    planner.__spec__ = importlib.machinery.ModuleSpec(planner.__name__, None)
    monkeypatch.setitem(sys.modules, planner.__name__, planner)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (23 * 2**30, 24 * 2**30))
    dataset = Dataset.from_list([{"prompt": "one"}, {"prompt": "one two three"}])
    on_card, on_cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    plan = planner_for_card("org/name", on_card, None, dataset, tiny_tokenizer())
    assert choose_mode(has_adapter=True, plan=plan).mode == Plan.mode
    assert asked["budget_gib"] == 23.0
    assert asked["prompt_len"] == len(tiny_tokenizer()("one two three")["input_ids"])
    assert planner_for_card("org/name", on_cpu, None, dataset, tiny_tokenizer()) is None


def test_longest_prompt() -> None:
    tokenizer = tiny_tokenizer()
    chats = Dataset.from_list(tiny_prompts(4))
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in chats]
    assert longest_prompt(chats, tokenizer) == max(len(tokenizer(text)["input_ids"]) for text in texts)
    assert longest_prompt(chats.to_iterable_dataset(), tokenizer) is None
    assert longest_prompt(chats, None) is None


class AddsBos:
    """A tokenizer of one token a letter; a text gets a BOS, a rendered chat has all it needs."""

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": ["<s>", *text]}

    def apply_chat_template(self, chat: Any, *, tokenize: bool = True, suffix: str = "", **_: Any) -> Any:
        text = "".join(turn["content"] for turn in chat) + suffix
        return list(text) if tokenize else text


def test_the_longest_prompt_is_counted_as_it_will_be_rendered() -> None:
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": "x" * size}]} for size in (3, 7, 5)])
    assert longest_prompt(chats, AddsBos()) == 7
    assert longest_prompt(chats, AddsBos(), {"suffix": "!!"}) == 9
    assert longest_prompt(chats, SimpleNamespace(tokenizer=AddsBos())) == 7  # a processor
    assert longest_prompt(Dataset.from_dict({"prompt": ["abc"]}), AddsBos()) == 4
