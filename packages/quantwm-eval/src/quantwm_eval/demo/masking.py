"""What sees what while a whole sequence is trained on, and attention under that mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from quantwm_eval.demo.config import ModelConfig


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """Attention of a whole sequence under a mask: flex attention for a block mask, dense for a bool ``[T, T]``."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2)


def sequence_mask(
    config: ModelConfig, chunks: int, device: torch.device | str, dense: bool = False
) -> BlockMask | Tensor:
    """The mask of ``[clean chunks 0.. | noisy chunks 1..]``.

    A clean chunk sees itself and ``past_chunks`` clean ones before it. A noisy chunk sees itself and the same clean
    past: what it will find in the cache when it is generated. Both see all of themselves.

    Returns:
        A ``BlockMask``, or a bool ``[T, T]`` where ``dense``.
    """
    size, past = config.chunk_tokens, config.past_chunks

    def allowed(_batch: Tensor, _head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        q_block, k_block = q_index // size, k_index // size
        noisy = q_block >= chunks
        q_chunk = torch.where(noisy, q_block - chunks + 1, q_block)
        recent = (k_block < chunks) & (k_block >= q_chunk - past) & (k_block < q_chunk)
        return recent | (q_block == k_block)

    tokens = (2 * chunks - 1) * size
    if dense:
        index = torch.arange(tokens, device=device)
        return allowed(index, index, index.unsqueeze(1), index.unsqueeze(0))
    return create_block_mask(allowed, None, None, tokens, tokens, device=device)
