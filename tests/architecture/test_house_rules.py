"""Holds the house rules that a parser can see: lengths, docstrings, prints, excepts."""

from __future__ import annotations

import ast

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
# A kernel body may be longer if its phases are named inner functions.
MAX_KERNEL_LINES = 150

# path or path::function -> why it may be longer
LENGTH_EXCEPTIONS: dict[str, str] = {}
# Modules that are commands: standard output is how they answer.
COMMANDS = ("draftco_jax/cli.py", "draftco_jax/warm_start.py")
# path -> why it may catch everything without raising again
BROAD_EXCEPT_EXCEPTIONS = {
    "draftco_jax/environments/reasoning_gym.py": "scorers of that package raise anything on an answer they cannot read",
    "draftco_jax/rewards/worker.py": "what a user's function raises is told to the parent as a fault",
}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_files_are_short_enough(all_sources):
    lengths = {source.path: len(source.text.splitlines()) for source in all_sources}
    long = {path: n for path, n in lengths.items() if n > MAX_FILE_LINES and path not in LENGTH_EXCEPTIONS}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short_enough(all_sources):
    long = []
    for source in all_sources:
        limit = MAX_KERNEL_LINES if source.path.startswith("pallas_kernels/") else MAX_FUNCTION_LINES
        for node in functions(source.tree):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{source.path}::{node.name}"
            if length > limit and name not in LENGTH_EXCEPTIONS:
                long.append(f"{name} has {length} lines, the limit is {limit}")
    assert not long, "\n".join(long)


def test_exceptions_to_the_lengths_are_still_needed(all_sources):
    known = {source.path for source in all_sources}
    known |= {f"{source.path}::{node.name}" for source in all_sources for node in functions(source.tree)}
    assert set(LENGTH_EXCEPTIONS) <= known


def test_every_module_says_its_job(all_sources):
    # A test file's job is said by its name.
    modules = [source for source in all_sources if not source.path.startswith("tests/")]
    silent = [source.path for source in modules if not ast.get_docstring(source.tree)]
    assert not silent, f"no module docstring: {silent}"


def test_the_library_does_not_print(package_sources):
    prints = [
        f"{source.path}:{node.lineno}"
        for source in package_sources
        if source.path not in COMMANDS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, f"print is for the commands {COMMANDS}: {prints}"


def catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)


def test_no_broad_except_swallows(package_sources):
    swallowed = [
        f"{source.path}:{node.lineno}"
        for source in package_sources
        if source.path not in BROAD_EXCEPT_EXCEPTIONS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and catches_everything(node)
        if not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]
    assert not swallowed, f"a broad except must re-raise: {swallowed}"
