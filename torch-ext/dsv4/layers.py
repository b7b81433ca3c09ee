"""Layers that replace the forward of transformers' DeepSeek-V4 modules.

`kernels.kernelize` binds `forward` to the original module, so `self` is that module and its attributes are the host's.
A layer holds no state and has no constructor. `type(self).forward(self, ...)` is the original forward.
"""

import sys

import torch
from torch import nn

from .rms_norm import rms_norm
from .rope import apply_rotary_pos_emb, apply_rotary_pos_emb_


class DeepseekV4RMSNorm(nn.Module):
    """transformers >= 5.20: weight times norm in fp32, one cast to the input's dtype."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class DeepseekV4RMSNormCastFirst(nn.Module):
    """transformers 5.17 to 5.19: the norm is cast to the input's dtype, then multiplied; fp32 out for an fp32 weight."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, rounding="normalized")


class DeepseekV4UnweightedRMSNorm(nn.Module):
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, eps=self.eps, rounding="scale")


class DeepseekV4Attention(nn.Module):
    """Our rotary embedding on q, kv and, inverse, on the output; projections, cache and attention stay the host's.

    Without autograd a rotation is in place where nobody else can hold the tensor: not behind a norm with forward hooks,
    nor on the output of an attention function that is not the host's eager one.
    """

    can_torch_compile = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache=None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The attention functions are looked up in the host's module, as the original does; torch 2.11 can't trace an import.
        host = sys.modules["transformers.models.deepseek_v4.modeling_deepseek_v4"]
        # transformers before 5.24 calls the cache `past_key_values`.
        if cache is None:
            cache = kwargs.pop("past_key_values", None)
        in_place = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        hooked = in_place and (_has_hooks(self.q_b_norm) or _has_hooks(self.kv_norm))
        rotate = apply_rotary_pos_emb_ if in_place and not hooked else apply_rotary_pos_emb
        tokens = hidden_states.shape[:-1]
        heads = (*tokens, -1, self.head_dim)
        cos, sin = position_embeddings[self.rope_layer_type]

        q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
        q = self.q_b_norm(self.q_b_proj(q_residual).view(heads).transpose(1, 2))
        q = rotate(q, cos, sin)
        kv = self.kv_norm(self.kv_proj(hidden_states)).view(heads).transpose(1, 2)
        kv = rotate(kv, cos, sin)
        if cache is not None:
            kv = cache.update(kv, kv, self.layer_idx, kwargs=kwargs)[0]

        if self.compressor is not None:
            compressed, block_bias = self.compressor(hidden_states, q_residual, position_ids, cache, self.layer_idx)
            kv = torch.cat([kv, compressed], dim=2)
            if isinstance(attention_mask, torch.Tensor) and kv.shape[2] > attention_mask.shape[-1]:
                if block_bias is None:  # the query sees every entry
                    attention_mask = nn.functional.pad(attention_mask, (0, kv.shape[2] - attention_mask.shape[-1]))
                else:
                    attention_mask = torch.cat([attention_mask, block_bias.to(attention_mask.dtype)], dim=-1)

        attention = host.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, host.eager_attention_forward
        )
        out, weights = attention(
            self,
            q,
            kv,
            kv,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            s_aux=self.sinks,
            **kwargs,
        )
        rotate = apply_rotary_pos_emb_ if in_place and attention is host.eager_attention_forward else apply_rotary_pos_emb
        # Values carry the key's rotation: undo it at the query's position. `out` is [B, T, H, D] here.
        out = rotate(out, cos, sin, unsqueeze_dim=2, inverse=True)
        out = self.o_a_proj(out.reshape(*tokens, self.config.o_groups, -1)).flatten(2)
        return self.o_b_proj(out), weights


def _has_hooks(module: nn.Module) -> bool:
    """True if somebody sees the module's output before its caller does."""
    return bool(module._forward_hooks or nn.modules.module._global_forward_hooks)
