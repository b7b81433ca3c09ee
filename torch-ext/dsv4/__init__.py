"""DeepSeek-V4 kernels for transformers. Everything public is named here."""

from . import layers
from .compressor import compress_kv
from .hadamard import hadamard_transform
from .indexer import topk
from .layer_mapping import kernelize, register_layer_mapping, unkernelize
from .layer_report import kernelization_report
from .rms_norm import rms_norm
from .rope import apply_rotary_pos_emb, apply_rotary_pos_emb_

__all__ = [
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_",
    "compress_kv",
    "hadamard_transform",
    "kernelization_report",
    "kernelize",
    "layers",
    "register_layer_mapping",
    "rms_norm",
    "topk",
    "unkernelize",
]
