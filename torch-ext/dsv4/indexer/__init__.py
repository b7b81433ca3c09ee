from .op import topk

__all__ = ["topk"]
