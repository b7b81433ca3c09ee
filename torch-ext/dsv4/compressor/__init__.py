from .op import compress_kv

__all__ = ["compress_kv"]
