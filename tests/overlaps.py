"""Finds labels of a picture that lie over one another, in a browser."""

from __future__ import annotations

from typing import Any

_SCRIPT = """(root) => {
  const boxes = [...document.querySelectorAll(root + ' text')].map((node) => {
    const { left, right, top, bottom } = node.getBoundingClientRect();
    return { label: node.textContent, left, right, top: top + 2, bottom: bottom - 2 };
  });
  const found = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
    if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) found.push([a.label, b.label]);
  }));
  const all = document.querySelector(root).getBoundingClientRect();
  const outside = boxes.filter((box) => box.left < all.left - 1 || box.right > all.right + 1);
  return found.concat(outside.map((box) => [box.label, 'edge']));
}"""


def overlapping_labels(page: Any, root: str) -> list[list[str]]:
    """Pairs of texts in the SVG element ``root`` that overlap, and texts that leave it."""
    found: list[list[str]] = page.evaluate(_SCRIPT, root)
    return found
