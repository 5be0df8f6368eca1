"""Rotary position embedding of queries and keys: `rope`, and `qk_norm_rope`, which also normalizes every head.

A rotation acts on P pairs of features, the first R = 2·P of the D features of a head:

    y1 = x1 · cos - x2 · sin        y2 = x2 · cos + x1 · sin

Pair p is features (p, p + P) ("rotate half"), or (2p, 2p + 1) if interleaved. Features from R on are copied.

cos and sin hold each angle once per pair, or twice as in `transformers`, or both are one complex tensor. They may be a
table that `positions` indexes. M-RoPE has three cos and sin, for positions in time, height and width; the section that
a pair belongs to selects one.

`rope.py` and `qk_norm_rope.py` are the operators. They share `cos_sin.py` (cos and sin) and `heads.py` (layouts of q
and k).
"""
