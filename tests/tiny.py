"""Random models and a tokenizer small enough for a test, built in memory: nothing is downloaded or cached.

Every builder is deterministic: the same arguments give the same weights, so that two runs can be compared bit by bit.
"""

from __future__ import annotations

import functools
from typing import Any

# ChatML, as SmolLM2 and Qwen use it. `{% generation %}` is left out: TRL patches templates that lack it.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def _tokenizer_json(vocab_size: int) -> str:
    """Train a byte-level BPE on a few lines and return it as JSON; every string can be encoded and decoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    corpus = [f"What is {a} + {b}? The answer is {a + b}." for a in range(10) for b in range(10)]
    corpus += ["user assistant system", "the quick brown fox jumps over the lazy dog", "Reply with the number only."]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(vocab_size: int = 384, *, pad_is_eos: bool = False, padding_side: str = "left") -> Any:
    """Return a fast byte-level BPE tokenizer with a ChatML template.

    Args:
        vocab_size: upper bound of the vocabulary, >= 259 (256 bytes and 3 special tokens).
        pad_is_eos: True makes the pad token the end token ``<|im_end|>``, as in SmolLM2; otherwise ``<|endoftext|>``.
        padding_side: "left" (generation) or "right".
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json(vocab_size)),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>" if pad_is_eos else "<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side=padding_side,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(
    kind: str = "llama", *, layers: int = 2, hidden: int = 32, vocab_size: int = 384, **overrides: Any
) -> Any:
    """Return the config of a small decoder of family ``kind`` ("llama", "qwen2", "qwen3", "gemma2", "mistral", ...).

    ``overrides`` go to the config class, so any field can be set (``tie_word_embeddings=False``, ``sliding_window=8``).
    """
    from transformers import AutoConfig

    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attention_dropout": 0.0,
    }
    fields.update(overrides)
    return AutoConfig.for_model(kind, **fields)


def tiny_model(
    kind: str = "llama",
    layers: int = 2,
    *,
    hidden: int = 32,
    vocab_size: int = 384,
    seed: int = 0,
    dtype: Any = None,
    **overrides: Any,
) -> Any:
    """Return a random causal language model in eval mode; its end token is the tokenizer's ``<|im_end|>`` (id 2).

    Args:
        kind: model family, see ``tiny_config``.
        layers: number of decoder layers.
        hidden: width, a multiple of 8.
        vocab_size: must be >= that of the tokenizer.
        seed: of the weights; the global RNG is left untouched.
        dtype: torch dtype of the weights; float32 by default.
        **overrides: fields of the config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind, layers=layers, hidden=hidden, vocab_size=vocab_size, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model.eval()


def tiny_prompts(num: int = 8, *, conversational: bool = True) -> list[dict[str, Any]]:
    """Return ``num`` rows with ``prompt`` (one user message, or a string) and ``answer`` (a string): one-digit sums."""
    rows: list[dict[str, Any]] = []
    for index in range(num):
        a, b = index % 10, (3 * index + 1) % 10
        text = f"What is {a} + {b}?"
        rows.append({"prompt": [{"role": "user", "content": text}] if conversational else text, "answer": str(a + b)})
    return rows


def save_tiny(directory: Any, **kwargs: Any) -> str:
    """Write a tiny model and its tokenizer to ``directory`` as an ordinary checkpoint; return the path."""
    tiny_model(**kwargs).save_pretrained(str(directory))
    tiny_tokenizer().save_pretrained(str(directory))
    return str(directory)
