"""Draws pages of five kinds: letter, invoice, form, chart, slide. The same seed gives the same page."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WIDTH, HEIGHT = 420, 594
SIDE = 224
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
"""Of the colours of ImageNet, with which the encoder was trained."""
TEXT = """
please note that our office will send the signed contract with all parts of the order before the end of next month and
ask every customer for a short answer about the delivery since prices may change when the new list is out
"""
WORDS = TEXT.split()
INKS = ("black", "#222244", "#333333", "#102050")
COLOURS = ("#b03030", "#3060a0", "#308050", "#c08020", "#604080", "#207080")


class Page:
    """A page under the pen."""

    def __init__(self, dice: random.Random, paper: str = "white") -> None:
        self.dice = dice
        self.image = Image.new("RGB", (WIDTH, HEIGHT), paper)
        self.pen = ImageDraw.Draw(self.image)
        self.ink = dice.choice(INKS)
        self.size = dice.randint(9, 13)
        self.left = dice.randint(25, 55)
        self.right = WIDTH - dice.randint(25, 55)

    def write(self, x: float, y: float, text: str, size: float | None = None, ink: str | None = None) -> None:
        self.pen.text((x, y), text, fill=ink or self.ink, font=ImageFont.load_default(size or self.size))

    def words(self, least: int, most: int) -> str:
        return " ".join(self.dice.choices(WORDS, k=self.dice.randint(least, most)))

    def paragraph(self, y: float, lines: int) -> float:
        """Write lines that fill the width, the last one shorter; returns where the next may begin."""
        for number in range(lines):
            share = self.dice.uniform(0.3, 0.7) if number == lines - 1 else 1.0
            text = self.words(14, 14)
            while self.pen.textlength(text, ImageFont.load_default(self.size)) > share * (self.right - self.left):
                text = text.rpartition(" ")[0]
            self.write(self.left, y, text)
            y += self.size * 1.4
        return y + self.size

    def line(self, *points: tuple[float, float], width: int = 1, ink: str | None = None) -> None:
        self.pen.line(points, fill=ink or self.ink, width=width)

    def price(self) -> str:
        return f"{self.dice.randint(1, 999)}.{self.dice.randint(0, 99):02}"


def letter(dice: random.Random) -> Page:
    page = Page(dice)
    y = dice.randint(30, 60)
    for _ in range(dice.randint(3, 4)):  # sender or receiver
        page.write(page.left, y, page.words(2, 3))
        y += page.size * 1.3
    page.write(page.right - 90, y + 10, f"{dice.randint(1, 28)} {dice.choice(('May', 'June', 'March'))} 2025")
    y += dice.randint(40, 70)
    page.write(page.left, y, f"Dear {dice.choice(('Sir or Madam', 'Mrs Berg', 'Mr Okafor', 'Anna'))},")
    y += page.size * 2.5
    for _ in range(dice.randint(2, 4)):
        y = page.paragraph(y, dice.randint(3, 6))
    page.write(page.left, y + page.size, "Kind regards")
    start = (page.left, y + 60)
    page.line(*[(start[0] + 8 * n, start[1] + dice.randint(-8, 8)) for n in range(9)], width=2, ink="#203080")
    return page


def invoice(dice: random.Random) -> Page:
    page = Page(dice)
    y = dice.randint(25, 45)
    page.write(page.left, y, dice.choice(("INVOICE", "Invoice", "Bill", "Statement")), dice.randint(18, 26))
    page.write(page.right - 100, y + 5, f"No. {dice.randint(100, 9999)}")
    y += dice.randint(60, 110)
    columns = [page.left, page.left + (page.right - page.left) * 0.55, page.left + (page.right - page.left) * 0.78]
    row, rows = page.size * dice.uniform(1.6, 2.2), dice.randint(5, 13)
    ruled = dice.random() < 0.6
    for number in range(rows + 1):
        cells = (
            ("Item", "Units", "Price") if number == 0 else (page.words(1, 3), str(dice.randint(1, 40)), page.price())
        )
        for x, cell in zip(columns, cells, strict=True):
            page.write(x + 4, y + 3, cell)
        if ruled or number in (0, rows):
            page.line((page.left, y + row), (page.right, y + row), width=2 if number == 0 else 1)
        y += row
    page.write(columns[1] + 4, y + 8, "Total")
    page.write(columns[2] + 4, y + 8, page.price(), page.size + 2)
    page.write(page.left, HEIGHT - 50, page.words(6, 9), page.size - 2)
    return page


def form(dice: random.Random) -> Page:
    page = Page(dice)
    y = dice.randint(25, 45)
    page.write(page.left, y, dice.choice(("Application form", "Registration", "Order form", "Change of address")), 18)
    y += 45
    boxed = dice.random() < 0.5
    while y < HEIGHT - 70:
        if dice.random() < 0.3:
            for x in (page.left, page.left + 110, page.left + 220):
                page.pen.rectangle((x, y, x + 11, y + 11), outline=page.ink)
                if dice.random() < 0.3:
                    page.line((x, y), (x + 11, y + 11))
                page.write(x + 17, y - 1, dice.choice(WORDS).title())
            y += dice.randint(24, 34)
            continue
        page.write(page.left, y + 4, f"{dice.choice(WORDS).title()} {dice.choice(WORDS)}")
        x = page.left + 120
        if boxed:
            page.pen.rectangle((x, y, page.right, y + page.size + 10), outline=page.ink)
        else:
            page.line((x, y + page.size + 8), (page.right, y + page.size + 8))
        if dice.random() < 0.4:
            page.write(x + 6, y + 4, page.words(1, 2), ink="#203080")
        y += page.size + dice.randint(18, 28)
    return page


def chart(dice: random.Random) -> Page:
    page = Page(dice)
    page.write(page.left, 30, page.words(3, 5).title(), dice.randint(13, 18))
    top, bottom = dice.randint(80, 140), dice.randint(330, 460)
    left, right = page.left + 25, page.right
    page.line((left, top), (left, bottom), (right, bottom), width=2)
    for number in range(5):
        y = bottom - (bottom - top) * number / 5
        page.write(page.left, y - page.size, str(number * 20), page.size - 1)
        page.line((left, y), (right, y), ink="#cccccc")
    count = dice.randint(5, 10)
    step = (right - left) / count
    heights = [dice.uniform(0.1, 0.95) * (bottom - top) for _ in range(count)]
    colours = dice.sample(COLOURS, 2)
    if dice.random() < 0.6:
        for number, height in enumerate(heights):
            x = left + step * number
            page.pen.rectangle((x + step * 0.2, bottom - height, x + step * 0.8, bottom), fill=colours[0])
    else:
        for colour in colours[: dice.randint(1, 2)]:
            points = [(left + step * (n + 0.5), bottom - dice.uniform(0.5, 1) * h) for n, h in enumerate(heights)]
            page.line(*points, width=3, ink=colour)
    page.paragraph(bottom + 40, dice.randint(1, 4))
    return page


def slide(dice: random.Random) -> Page:
    dark = dice.random() < 0.4
    page = Page(dice, dice.choice(("#203050", "#303030", "#204040")) if dark else dice.choice(("white", "#f4f0e4")))
    ink = "white" if dark else page.ink
    middle = HEIGHT // 2 - 120
    page.pen.rectangle((0, middle, WIDTH, middle + 6), fill=dice.choice(COLOURS))
    page.write(page.left, middle - 50, page.words(2, 3).title(), dice.randint(24, 30), ink)
    y = middle + 40
    for _ in range(dice.randint(3, 5)):
        page.pen.ellipse((page.left, y + 6, page.left + 7, y + 13), fill=ink)
        page.write(page.left + 18, y, page.words(3, 5), dice.randint(16, 19), ink)
        y += dice.randint(36, 50)
    return page


KINDS: dict[str, Callable[[random.Random], Page]] = {
    "letter": letter, "invoice": invoice, "form": form, "chart": chart, "slide": slide,
}  # fmt: skip


def draw(kind: str, seed: int, *, scanned: bool = False) -> Image.Image:
    """Draw a page; ``scanned``: askew, on grey paper, blurred and with specks, as pages in training never are."""
    dice = random.Random(f"{kind} {seed}")
    image = KINDS[kind](dice).image
    if not scanned:
        return image.rotate(dice.uniform(-1, 1), fillcolor="white")
    image = image.rotate(dice.uniform(-6, 6), fillcolor="#555555", expand=True).filter(ImageFilter.GaussianBlur(0.8))
    noise = np.random.default_rng(seed).normal(-18, 14, (image.height, image.width, 1))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    """Return a picture as the encoder takes it: 3 × 224 × 224, float32."""
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = (np.asarray(small) / 255 - MEAN) / DEVIATION
    return values.transpose(2, 0, 1).astype(np.float32)
