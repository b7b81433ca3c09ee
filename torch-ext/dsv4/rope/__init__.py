from .op import apply_rotary_pos_emb, apply_rotary_pos_emb_

__all__ = ["apply_rotary_pos_emb", "apply_rotary_pos_emb_"]
