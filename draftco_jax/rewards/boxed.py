r"""The last ``\boxed{...}`` of a text."""

from __future__ import annotations

_MARK = r"\boxed{"


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``, inner braces matched; None if there is none or it does not close."""
    start = text.rfind(_MARK)
    if start < 0:
        return None
    start += len(_MARK)
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None
