"""Rotary position embedding of queries and keys: `rope`, and `qk_norm_rope`, which normalizes every head before.

A rotation turns P pairs of features, the first R = 2·P of the D features of a head:

    y1 = x1 · cos - x2 · sin        y2 = x2 · cos + x1 · sin

Pair p is features (p, p + P), as in "rotate half", or interleaved, (2p, 2p + 1). Features from R on pass through.

Angles come one per pair, each twice (as the convention itself repeats them) or complex. They may be a table of which
`positions` names the rows. With M-RoPE there are three of each, for positions in time, height and width, and a pair
takes the one of its section.
"""
