"""Bytes that follow from shapes alone: quantised weights, 8-bit optimiser states, keys and values, what CUDA takes.

Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

MIB = 2**20
GIB = 2**30

NF4_BLOCK = 64
NESTED_BLOCK = 256
EIGHT_BIT_BLOCK = 256
EIGHT_BIT_MIN_ELEMENTS = 4096

# What a process holds on the card before the first tensor: driver, kernels, libraries. 0.14 GiB was measured on a T4;
# newer cards and more libraries take more, so the default is generous. A measured value can be given instead.
CUDA_CONTEXT_BYTES = GIB // 2
# cuBLAS keeps a workspace per handle and stream: 8 MiB and 128 KiB by default, four times as much on Hopper (PyTorch's
# CUBLAS_WORKSPACE_CONFIG of :4096:2:16:8 and :4096:8). Forward and backward run on two threads with a handle each.
CUBLAS_WORKSPACE_BYTES = 8 * MIB + MIB // 8
CUBLAS_WORKSPACES = 2
# What vLLM keeps beside weights and cache: graphs, the sampler's buffers, the part that does not sleep. A guess within
# the range that users report (0.5 to 1.5 GiB); no measurement of ours stands behind it.
VLLM_REMAINDER_BYTES = GIB


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def nf4_bytes(num_elements: int, *, double_quantised: bool = True) -> int:
    """Return the bytes of a weight in 4-bit NormalFloat as bitsandbytes stores it (QLoRA, 2305.14314, section 3).

    Two values a byte and a scale per 64; double quantisation keeps the scales in 8 bits, with a second scale per 256 of
    them. Tables: 16 float32 values, with double quantisation 256 more and an offset.
    """
    blocks = ceil_div(num_elements, NF4_BLOCK)
    packed = ceil_div(num_elements, 2) + 16 * 4
    if not double_quantised:
        return packed + 4 * blocks
    return packed + blocks + 4 * ceil_div(blocks, NESTED_BLOCK) + 256 * 4 + 4


def int8_bytes(num_rows: int, num_columns: int) -> int:
    """Return the bytes of a (rows, columns) weight in LLM.int8() (2208.07339): one each, and a float32 per row."""
    return num_rows * num_columns + 4 * num_rows


def adamw_8bit_bytes(sizes: Iterable[int]) -> int:
    """Return the state of 8-bit AdamW (2110.02861) for tensors of so many elements, without the two shared tables.

    Two bytes an element and two float32 scales per 256; a tensor below 4096 elements keeps both moments in float32.
    """
    total = 0
    for size in sizes:
        if size < EIGHT_BIT_MIN_ELEMENTS:
            total += 8 * size
        else:
            total += 2 * size + 2 * 4 * ceil_div(size, EIGHT_BIT_BLOCK)
    return total


def kv_cache_bytes(
    num_tokens_per_row: int, num_rows: int, windows: Iterable[int | None], num_kv_heads: int, head_dim: int, width: int
) -> int:
    """Return the bytes of keys and values of ``num_rows`` rows.

    Args:
        num_tokens_per_row: tokens in the cache of each row.
        num_rows: rows.
        windows: for each layer, the tokens it can look back on; None for all.
        num_kv_heads: key and value heads.
        head_dim: of a head.
        width: bytes of a number.
    """
    tokens = sum(num_tokens_per_row if window is None else min(num_tokens_per_row, window) for window in windows)
    return 2 * num_kv_heads * head_dim * width * tokens * num_rows


def sampling_bytes(num_rows: int, vocab_size: int, *, width: int = 2) -> int:
    """Return what drawing one token per row needs: logits, also in float32, probabilities, a sorted copy with indices.

    A bound for the sampler of ``generate`` with top-k or top-p, whose sort holds float32 values and int64 indices.
    """
    return num_rows * vocab_size * (width + 4 + 4 + 4 + 8)
