"""Rows of Parquet files, by the optional ``pyarrow`` package (``pip install 'draftco[parquet]'``)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftco_jax.errors import UserError


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row from 0, its values in these columns), a batch in memory at a time.

    Raises `UserError` where the package, the file or a column is missing.
    """
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow to be read; run: pip install 'draftco[parquet]'") from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as error:
        what = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as Parquet ({what}); give another file or layout") from error
    with file:
        missing = set(columns) - set(file.schema_arrow.names)
        if missing:
            raise UserError(
                f"{path} has the columns {', '.join(file.schema_arrow.names)}, not {', '.join(sorted(missing))}; set "
                "layout, question_field and answer_field by them"
            )
        row = 0
        try:
            for batch in file.iter_batches(batch_size=4096, columns=list(columns)):
                for value in batch.to_pylist():
                    yield row, value
                    row += 1
        except (OSError, arrow.ArrowException) as error:
            what = " ".join(str(error).split())
            raise UserError(f"{path} is broken after row {row} ({what}); copy it anew") from error
