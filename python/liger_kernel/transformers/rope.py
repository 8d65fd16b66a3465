from liger_kernel.operators.rope import (
    liger_deinterleaving_rotary_pos_emb,
    liger_half_table_rotary_pos_emb,
    liger_interleaved_rotary_pos_emb,
    liger_paired_table_rotary_pos_emb,
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_vision,
)

liger_rotary_pos_emb_gpt_oss = liger_half_table_rotary_pos_emb
