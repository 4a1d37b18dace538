"""The process that runs one scoring function: a JSON line in, a JSON line out, until its input ends.

    python -m draftco_jax.rewards.worker package.module:function SECONDS MEBIBYTES [MODULE ...]

It starts without JAX; the modules are loaded before it says that it is ready, and so in nobody's time limit. What the
function prints goes to standard error. A request is ``[response, answer]``, a reply ``{"total": ..., "components":
{...}, "answer": ..., "fault": ...}``; the first line is ``{"ready": true}`` or ``{"failed": "..."}``.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from draftco_jax.rewards.scores import is_finite

_MAX_ANSWER_CHARACTERS = 1000


def load_function(path: str) -> Callable[[str, str], Any]:
    """The function ``package.module:function``; ImportError, AttributeError or TypeError where there is none."""
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{path} is a {type(function).__name__}, not a function")
    return function


def as_reply(value: Any) -> dict[str, Any]:
    """What a function returned, as a reply: a number, or a mapping of numbers with "total" or "correct" among them.

    "answer" of a mapping is the text that was read out of the response; every other name is a component.
    """
    answer = None
    if isinstance(value, Mapping):
        parts = {str(name): part for name, part in value.items()}
        answer = parts.pop("answer", None)
        components = {name: float(part) for name, part in parts.items() if name != "total"}
        if "total" not in parts and "correct" not in parts:
            raise ValueError(f"the mapping returned has {sorted(parts)}, it needs total or correct")
        total = float(parts["total" if "total" in parts else "correct"])
    else:
        total = float(value)
        components = {"correct": total}
    for name, number in {"total": total, **components}.items():
        if not is_finite(number):
            raise ValueError(f"{name}={number} is not finite in float32")
    text = None if answer is None else str(answer)[:_MAX_ANSWER_CHARACTERS]
    return {"total": total, "components": components, "answer": text, "fault": None}


def serve(function: Callable[[str, str], Any], requests: TextIO, replies: TextIO, seconds: float) -> None:
    """Answers requests until they end. The kernel ends the process where an answer takes far longer than allowed and
    nobody is left to do it: the signal's own action needs no help of Python's."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in requests:
        response, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 5)
        try:
            reply = as_reply(function(response, answer))
        except BaseException as error:  # whatever a function raises on a text it cannot read, SystemExit too
            reply = {"fault": f"{type(error).__name__}: {error}"[:300]}
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the function may have set its own
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main(path: str, seconds: str, mebibytes: str, *modules: str) -> None:
    """Loads the function and serves it on standard input and output."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        function = load_function(path)
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        replies.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
        replies.flush()
        raise
    limit = int(mebibytes) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies.write('{"ready": true}\n')
    replies.flush()
    serve(function, sys.stdin, replies, float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
