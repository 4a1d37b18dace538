"""Executes every notebook from its own folder, in a process of its own, and reads what it printed."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from pallas_kernels import deviceless

nbclient = pytest.importorskip("nbclient", reason="pip install 'draftco[notebooks]' to execute the notebooks")
nbformat = pytest.importorskip("nbformat", reason="pip install 'draftco[notebooks]' to execute the notebooks")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What a notebook prints if it came to its end.
SAYS = {"lossless_rollouts": "accepted length", "branch_kernel": "worst / bound"}
# There is no other way to hide what is installed from the process of a notebook.
NO_COMPILER = "from pallas_kernels.deviceless import plugin; plugin.FOLDER_NAME = 'not-installed'"

# The notebook client closes its event loop and sockets when the garbage collector comes by.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(notebook):
    """(text that it printed, number of its pictures)."""
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    return text, sum("image/png" in output.get("data", {}) for output in outputs)


@functools.cache
def executed(name):
    return execute(read(name))


def table(text, first, *columns):
    """Columns of numbers of the lines that start with `first`; a number ends where the name of its column ends."""
    lines = text.splitlines()
    (head,) = [line for line in lines if all(f" {name}" in line for name in columns)]
    ends = [head.index(f" {name}") + 1 + len(name) for name in columns]
    return [[line[:end].split()[-1] for end in ends] for line in lines if re.match(first, line)]


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_notebook_is_stripped(name):
    assert all(not cell.get("outputs") for cell in read(name).cells), "strip the outputs before committing"


# The kernels of the other one and what is compiled of them are held every day by tests/kernels and tests/aot.
@pytest.mark.parametrize("name", ["lossless_rollouts", pytest.param("branch_kernel", marks=pytest.mark.slow)])
def test_a_notebook_runs(name):
    assert SAYS[name] in executed(name)[0]


@pytest.mark.slow
def test_the_branch_kernels_of_the_notebook_keep_the_contract():
    for dtype, rounded in (("float32", False), ("bfloat16", True)):
        rows = table(executed("branch_kernel")[0], rf"(few|block) +{dtype} ", "out", "dk", "worst / bound")
        assert len(rows) == 2  # routes
        for out, dk, worst in rows:
            assert 0 < float(worst) < 1
            assert (float(out) > 1e-4) == (float(dk) > 1e-4) == rounded  # both are of the dtype of the shape


@pytest.mark.slow
@pytest.mark.skipif(
    not deviceless.available(), reason=f"no compiler for GPUs in {deviceless.folder()}: run `make setup`"
)
def test_the_notebook_reads_what_was_compiled_for_h100():
    text, pictures = executed("branch_kernel")
    for tuning, spills in (("table", False), ("mine", False), ("too large", True)):
        rows = table(text, rf"(few|block) +{tuning} ", "registers", "spills", "/ minimum")
        assert len(rows) == 4  # two routes, forward and backward
        for registers, spilled, over in rows:
            assert 0 < int(registers) <= 255 and (int(spilled) > 0) == spills and float(over) >= 1
    permutes = re.findall(r"^\d+ MiB x \d+, (.*), hidden: (.*)$", text, re.MULTILINE)
    assert permutes and {how for how, _ in permutes} == {"asynchronous"}
    # The last one may have nothing to run beside it.
    assert {hidden for _, hidden in permutes[:-1]} == {"True"}
    (sent, formula) = re.findall(r"a rank sends (\d+) bytes, the formula says (\d+)", text)[0]
    assert sent == formula
    assert pictures == 1


def test_without_the_compiler_the_notebook_says_so_and_goes_on():
    notebook = read("branch_kernel")
    # Left out: what needs no compiler and is seen by the tests above.
    notebook.cells = [cell for cell in notebook.cells if "errors(shape" not in cell.source]
    notebook.cells.insert(0, nbformat.v4.new_code_cell(NO_COMPILER))
    text, pictures = execute(notebook)
    # When it starts, and in the place of the registers, of the ring, and of its picture.
    assert len(re.findall(r"^no compiler for GPUs in .*not-installed: run `make setup`", text, re.MULTILINE)) == 4
    assert "eagle3_8k_pass4" in text and not pictures
