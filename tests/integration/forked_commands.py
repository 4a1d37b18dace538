"""Runs `draftco` commands, each in a forked process of its own, without importing everything anew each time.

Reads one JSON object a line, {"arguments": [...], "out": path, "err": path}; answers each with its exit code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import draftco_jax.loop  # noqa: F401 -- imported before the forks; starts no backend, so no threads are lost
from draftco_jax import cli


def run(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(request[name], os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
        code = run(request["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
