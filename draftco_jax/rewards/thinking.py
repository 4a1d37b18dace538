"""What of a response is the answer, where a policy thinks aloud first."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def is_open(text: str) -> bool:
    """Whether a text ends inside a thinking block, as the prompts of some chat templates do."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def after_thinking(response: str, *, opened: bool = False) -> str | None:
    """What follows the last ``</think>``, or all where nothing was thought; None where thinking has not ended.

    ``opened``: the prompt ended inside a thinking block.
    """
    _, close, rest = response.rpartition(CLOSE)
    if OPEN in rest or (opened and not close):
        return None
    return rest
