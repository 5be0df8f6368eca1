"""Pairs of answers as a file."""

import json

PAIRS = [
    {"prompt": f"What is {n} and {n}?", "chosen": f" It is {2 * n}.", "rejected": " Well, let me see." * (n % 3 + 1)}
    for n in range(24)
]


def write_pairs(path, pairs=PAIRS):
    """Fill the file, one pair a line, and return its name."""
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)
