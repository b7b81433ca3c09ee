"""A DeepSeek-V4 of three layers, small enough for the interpreter, with weights that hide nothing."""

import torch
from conftest import DEVICE


def tiny_config(**changes):
    from transformers import DeepseekV4Config

    settings = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=32, q_lora_rank=16, o_groups=2,
        o_lora_rank=8, index_n_heads=16, index_head_dim=16, index_topk=2, sliding_window=4, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=16, vocab_size=64, partial_rotary_factor=0.25,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        eos_token_id=None,
    )  # fmt: skip
    return DeepseekV4Config(**settings | changes)


@torch.no_grad()
def tiny_model(dtype=torch.float32, **changes):
    """Parameters ~ N(0, 0.3), norm weights ~ N(1, 0.2), biases ~ N(0, 0.5), `tid2eid` of distinct random experts."""
    from transformers import DeepseekV4ForCausalLM

    config = tiny_config(**changes)
    generator = torch.Generator().manual_seed(0)
    model = DeepseekV4ForCausalLM._from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            first = torch.randint(config.n_routed_experts, (config.vocab_size, 1), generator=generator)
            tensor.copy_((first + torch.arange(tensor.shape[1]) * 3) % config.n_routed_experts)
        elif "inv_freq" not in name:
            mean, std = (1.0, 0.2) if name.endswith("norm.weight") else (0.0, 0.5 if "bias" in name else 0.3)
            tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))
    strict = tuple(model._keep_in_fp32_modules_strict)
    for name, parameter in model.named_parameters():
        # As from_pretrained does since 5.20: norms, mHC and sinks stay fp32 in a bf16 model.
        if not any(part in strict for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model.to(DEVICE).eval()


def tiny_ids(batch=2, tokens=19, seed=0):
    return torch.randint(64, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
