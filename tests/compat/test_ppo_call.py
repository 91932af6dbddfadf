"""Which arguments a call means, whatever era it was written for. Objects are told by their shape, so none is real."""

from __future__ import annotations

from typing import Any

import pytest

from trl_grpo_ext.compat.call import UnknownArgumentError, accepts_ppo_calls, is_ppo_call, normalize_call
from trl_grpo_ext.errors import ConfigurationError


class Config:
    per_device_train_batch_size, learning_rate, num_ppo_epochs = 8, 1e-6, 4

    def __init__(self, era: str | None = None) -> None:
        self.era_hint = era


class GRPOLike:
    per_device_train_batch_size, learning_rate, num_generations = 8, 1e-6, 8


class Model:
    def __init__(self, generates: bool = True) -> None:
        self.generates = generates

    def forward(self) -> None: ...

    def get_output_embeddings(self) -> Any:
        return "head" if self.generates else None


class Wrapper:
    pretrained_model = Model()


class Tokenizer:
    def batch_decode(self) -> None: ...


CONFIG, MODEL, REF, REWARD, TOKENIZER, DATA = Config(), Model(), Model(), Model(generates=False), Tokenizer(), [1]


def test_v2_positions() -> None:
    value = Model(generates=False)
    call = normalize_call((CONFIG, TOKENIZER, MODEL, REF, REWARD, DATA, value, "collate", [2], (1, 2), [3], "peft"), {})
    assert (call.era, call.args, call.model, call.ref_model, call.reward_model) == ("v2", CONFIG, MODEL, REF, REWARD)
    assert call.grpo == {
        "processing_class": TOKENIZER,
        "train_dataset": DATA,
        "eval_dataset": [2],
        "optimizers": (1, 2),
        "callbacks": [3],
        "peft_config": "peft",
    }
    assert call.ignored == ("value_model",)
    assert call.data_collator == "collate"


def test_classic_positions() -> None:
    call = normalize_call((CONFIG, Wrapper(), Wrapper(), TOKENIZER, DATA, "adam", "collate", 3, "plan", "pads"), {})
    assert (call.era, call.num_shared_layers, call.data_collator) == ("classic", 3, "collate")
    assert call.grpo == {"processing_class": TOKENIZER, "train_dataset": DATA, "optimizers": ("adam", "plan")}


def test_classic_positions_without_reference() -> None:
    call = normalize_call((CONFIG, MODEL, None, TOKENIZER), {"dataset": DATA})
    assert (call.era, call.model, call.ref_model) == ("classic", MODEL, None)


@pytest.mark.parametrize(
    ("keywords", "era"),
    [
        (
            {
                "config": CONFIG,
                "processing_class": TOKENIZER,
                "policy": MODEL,
                "ref_policy": REF,
                "reward_model": REWARD,
            },
            "v2",
        ),
        (
            {"config": CONFIG, "tokenizer": TOKENIZER, "policy": MODEL, "reward_model": REWARD, "train_dataset": DATA},
            "v2",
        ),
        ({"args": CONFIG, "processing_class": TOKENIZER, "model": MODEL, "train_dataset": DATA}, "v2"),
        ({"config": CONFIG, "model": MODEL, "ref_model": REF, "tokenizer": TOKENIZER, "dataset": DATA}, "classic"),
        ({"config": Config("classic"), "model": MODEL}, "classic"),
        ({"config": Config("classic"), "model": MODEL, "reward_model": REWARD}, "v2"),
        ({"config": Config("v2"), "model": MODEL, "tokenizer": TOKENIZER}, "v2"),
        ({"args": CONFIG, "model": MODEL, "reward_funcs": len}, "v2"),
    ],
)
def test_keywords_tell_the_era(keywords: dict[str, Any], era: str) -> None:
    call = normalize_call((), keywords)
    assert call.era == era
    assert call.model is MODEL


def test_grpo_positions_with_a_ppo_keyword() -> None:
    call = normalize_call((MODEL, len, GRPOLike()), {"ref_model": REF, "train_dataset": DATA})
    assert (call.model, call.reward_funcs, call.ref_model, call.era) == (MODEL, len, REF, "v2")


@pytest.mark.parametrize(
    ("args", "kwargs", "is_ppo"),
    [
        ((MODEL, len, GRPOLike(), DATA), {}, False),
        (("some/model", REWARD), {"args": GRPOLike(), "train_dataset": DATA}, False),
        ((), {"model": MODEL, "reward_funcs": len, "args": GRPOLike(), "peft_config": 1}, False),
        ((MODEL,), {"reward_funcs": len, "ref_model": REF}, True),
        ((CONFIG, TOKENIZER, MODEL), {}, True),
        ((), {"args": CONFIG, "model": MODEL}, True),
        ((MODEL, len, CONFIG), {}, True),
        ((MODEL, REF, TOKENIZER), {}, True),
    ],
)
def test_only_ppo_calls_are_touched(args: tuple[Any, ...], kwargs: dict[str, Any], is_ppo: bool) -> None:
    assert is_ppo_call(args, kwargs) is is_ppo


def test_a_grpo_call_reaches_the_constructor_as_it_was() -> None:
    seen = []

    class Trainer:
        @accepts_ppo_calls
        def __init__(self, model: Any, reward_funcs: Any = None, **kwargs: Any) -> None:
            seen.append((model, reward_funcs, kwargs))

    Trainer(MODEL, REWARD, tools=[1])
    assert seen == [(MODEL, REWARD, {"tools": [1]})]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"config": CONFIG, "args": CONFIG}, "Both 'config' and 'args' are given. Keep one, 'args'."),
        ((), {"tokenizer": TOKENIZER, "processing_class": TOKENIZER}, "Keep one, 'processing_class'."),
        ((CONFIG,), {"policy": MODEL, "model": MODEL}, "Both 'policy' and 'model' are given. Keep one, 'model'."),
        ((CONFIG,), {"optimizer": 1, "optimizers": (1, 2)}, "Keep one, 'optimizers'."),
        (
            (CONFIG,),
            {"reward_model": REWARD, "reward_funcs": len},
            "Both reward_model and reward_funcs are given. Pass one",
        ),
        ((MODEL, REF, TOKENIZER), {}, "TRL < 0.2 call style"),
        ((42,), {"ref_model": REF}, "The first argument is a int"),
        ((CONFIG,), {"reward_modle": REWARD}, "Unknown argument 'reward_modle'. Did you mean 'reward_model'?"),
        ((CONFIG,), {"proc_class": TOKENIZER}, "Unknown argument 'proc_class'."),
    ],
)
def test_refusals_say_what_to_do(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        normalize_call(args, kwargs)
    assert message in str(error.value)


def test_an_unknown_keyword_is_a_type_error_too() -> None:
    with pytest.raises(TypeError):
        normalize_call((CONFIG,), {"batchsize": 4})
    assert issubclass(UnknownArgumentError, ValueError)
