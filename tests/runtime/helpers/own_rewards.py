"""Reward functions of a user's, for tests."""

import asyncio
import os
import subprocess
import time


def varied(completions, **columns):
    """A number that differs between texts."""
    return [(sum(map(ord, text)) % 7) / 7 + 0.05 * len(text) for text in completions]


def unknown_for_some(completions, **columns):
    """As `varied`, but no value for about half of the answers."""
    return [
        None if sum(map(ord, text)) % 2 else value for text, value in zip(completions, varied(completions), strict=True)
    ]


def rounded(completions, least=0, **columns):
    """0 or 1, so that groups may have no signal."""
    return [float(sum(map(ord, text)) % 3 >= least + 1) for text in completions]


def of_late_prompts(prompts, completions, **columns):
    """As `varied`, but 0 for all answers to prompts that begin early in the alphabet."""
    return [value * (prompt > "e") for prompt, value in zip(prompts, varied(completions), strict=True)]


def needs_column(completions, wanted):
    return [float(text == right) for text, right in zip(completions, wanted, strict=True)]


def fails_for_b(prompts, completions, **columns):
    if any(prompt.startswith("b") for prompt in prompts):
        raise KeyError("no b")
    return [1.0] * len(prompts)


def returns_nan(completions, **columns):
    return [float("nan")] * len(completions)


def is_slow(completions, **columns):
    time.sleep(60)


def ends(completions, **columns):
    raise SystemExit(3)


def needs_prompt(completions, prompt):
    return [float(len(text)) for text in prompt]


def fails_together(completions, **columns):
    """Alone, an answer is another error, and the next one takes for ever."""
    if len(completions) > 1:
        raise KeyError("all of them")
    if completions == ["one"]:
        raise ValueError("one is too few")
    time.sleep(60)


def sometimes(completions, prompts, **columns):
    """No value for prompts that begin late in the alphabet."""
    return [None if prompt > "d" else 2.0 for prompt in prompts]


def returns_text(completions, **columns):
    """Characters that can be read as numbers."""
    return "1" * len(completions)


def returns_mapping(completions, **columns):
    return {str(number): 1.0 for number in range(len(completions))}


def returns_texts(completions, **columns):
    return ["1"] * len(completions)


def forks(completions, **columns):
    """Returns in two processes."""
    os.fork()
    return [1.0] * len(completions)


def leaves_processes(completions, folder, **columns):
    """In its session, and outside of it; then takes for ever."""
    for new in (False, True):
        subprocess.Popen(["sleep", "600"], cwd=folder, start_new_session=new)
    time.sleep(60)


async def waits(completions, wanted):
    """Scores all answers at once, as one that asks a judge does."""

    async def of(text, right):
        await asyncio.sleep(0.01)
        return float(text == right)

    return await asyncio.gather(*map(of, completions, wanted))


class Waiting:
    async def __call__(self, completions, wanted):
        return await waits(completions, wanted)


waiting = Waiting()


async def waits_and_fails_for_b(prompts, completions):
    await asyncio.sleep(0)
    return fails_for_b(prompts, completions)


async def waits_too_long(completions):
    await asyncio.sleep(60)
