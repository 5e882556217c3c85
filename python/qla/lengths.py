"""Sequence lengths as people and the published tables write them."""

from __future__ import annotations


def parse_lengths(text: str) -> list[int]:
    """ "4096", "1024+7168", "8192x4" (four of 8192), "1x32768" (one of 32768, as the published tables write it)."""
    lengths: list[int] = []
    for part in text.replace(",", "+").split("+"):
        try:
            numbers = [int(n) for n in part.split("x")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or min(numbers) < 0 or (len(numbers) == 2 and min(numbers) == 0):
            raise ValueError(f"lengths: expected e.g. 4096, 1024+7168 or 8192x4, got {part!r}")
        length, count = max(numbers), min(numbers) if len(numbers) == 2 else 1
        lengths += [length] * count
    return lengths
