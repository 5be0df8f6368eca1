"""Rotary position embedding of queries and keys: `rope`, and `qk_norm_rope`, which also normalizes every head.

A rotation acts on P pairs of features, the first R = 2·P of the D features of a head:

    y1 = x1 · cos - x2 · sin        y2 = x2 · cos + x1 · sin

Pair p is features (p, p + P), as in "rotate half", or, interleaved, (2p, 2p + 1). Features from R on are copied.

cos and sin hold each angle once per pair, or twice as `transformers` has them, or both are one complex tensor. They may
be a table, of which `positions` gives the rows. M-RoPE has three of each, for positions in time, height and width; the
section of a pair decides which one it takes.

`rope.py` and `qk_norm_rope.py` are the operators. They share `cos_sin.py`, the angles, and `heads.py`, the layouts of q
and k.
"""
