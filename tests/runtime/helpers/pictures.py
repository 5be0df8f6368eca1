"""Pictures whose shape only the image holds, and rows that ask for it."""

from __future__ import annotations

import json
import random

from PIL import Image, ImageDraw

SHAPES = ("circle", "triangle", "cross")
QUESTION = "What shape is this?"


def picture(shape, draw, size=32):
    """A dark shape of any place, size and colour on a light ground. draw: a `random.Random`."""
    background, ink = (tuple(draw.randrange(low, low + 60) for _ in range(3)) for low in (195, 0))
    image = Image.new("RGB", (size, size), background)
    radius = draw.randint(size // 4, size * 3 // 8)
    x, y = (draw.randint(radius, size - 1 - radius) for _ in range(2))
    box, pen = (x - radius, y - radius, x + radius, y + radius), ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse(box, fill=ink)
    elif shape == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=ink)
    else:
        width = max(2, radius // 2)
        pen.line((x - radius, y, x + radius, y), fill=ink, width=width)
        pen.line((x, y - radius, x, y + radius), fill=ink, width=width)
    return image


def write_shapes(folder, rows, *, seed=0, name="train", answers=SHAPES, size=16):
    """Rows in `folder/name.jsonl` with pictures beside it, in OpenAI's form. answers: one for each of SHAPES."""
    draw, found = random.Random(seed), []
    (folder / name).mkdir(parents=True)
    for number in range(rows):
        shape, answer = list(zip(SHAPES, answers, strict=True))[number % len(SHAPES)]
        path = f"{name}/{number}.png"
        picture(shape, draw, size).save(folder / path)
        parts = [{"type": "image_url", "image_url": {"url": path}}, {"type": "text", "text": QUESTION}]
        found.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
    draw.shuffle(found)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return file
