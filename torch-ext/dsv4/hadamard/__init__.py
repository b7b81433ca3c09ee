from .op import hadamard_transform

__all__ = ["hadamard_transform"]
