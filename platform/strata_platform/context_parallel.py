"""Which method attention takes under context parallelism, for the runtime and for estimates."""

from __future__ import annotations


def divides_heads(queries: int, keys: int, ways: int) -> bool:
    """Whether `ways` ranks can share the heads. Several of them may share one of keys."""
    return queries % ways == 0 and (keys % ways == 0 or ways % keys == 0)


def undivided_heads(method: str, queries: int, keys: int, ways: int) -> str | None:
    """What is wrong with `method` for a rank's heads of queries and of keys; None if nothing is."""
    if method != "ulysses" or divides_heads(queries, keys, ways):
        return None
    return (
        f"'ulysses' divides heads over {ways} processes, but the model has {queries} heads of queries and {keys} of "
        "keys in each; set it to 'all_gather'"
    )


def exchanges_heads(method: str, queries: int, keys: int, ways: int) -> bool:
    """Whether attention exchanges heads (`ulysses`), for a rank's heads of queries and of keys."""
    if method != "auto" or not divides_heads(queries, keys, ways):
        return method == "ulysses"
    # Per token of a row, a rank sends all heads of its slice and gets the result back, or gets all keys and values.
    return 2 * (queries + max(keys, ways)) / ways < 2 * keys
