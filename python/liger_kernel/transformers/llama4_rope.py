from liger_kernel.operators.rope import (
    LigerLlama4RopeFunction,
    apply_liger_llama4_rope_full,
    liger_complex_rotary_pos_emb,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
)
