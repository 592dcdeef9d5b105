"""The rows of data sets, unchecked: local files and folders, and the hub."""

from collections.abc import Iterator
import json
import pathlib

from tepo_jax import errors


def local_rows(path: pathlib.Path, split: str | None
               ) -> Iterator[tuple[int, object]]:
  """Yields (row number, row) of an existing file or folder.

  A row that cannot be read is an InputError.

  Raises:
    InputError: nothing of the path can be read.
  """
  if path.is_dir():
    return dataset_rows(str(path), None, split or 'train')
  if path.suffix == '.jsonl':
    return _jsonl_rows(path)
  if path.suffix == '.parquet':
    return _parquet_rows(path)
  raise errors.InputError(f'{path}: not a .jsonl or .parquet file or a folder')


def dataset_rows(path: str, config: str | None, split: str
                 ) -> Iterator[tuple[int, object]]:
  """Yields (row number, row) of what the `datasets` library can load.

  Raises:
    InputError: it cannot.
  """
  import datasets  # the library; slow to import
  try:
    return enumerate(datasets.load_dataset(path, config, split=split), 1)
  except Exception as error:  # The library and its hub client raise anything.
    raise errors.InputError(
        f'{path}: cannot be loaded: {errors.one_line(error)}') from error


def _jsonl_rows(path):
  with path.open('rb') as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        try:
          row = json.loads(line)
        except (ValueError, RecursionError) as error:
          row = errors.InputError(f'{path}: row {number}: not JSON ({error})')
        yield number, row


def _parquet_rows(path):
  from pyarrow import lib, parquet
  try:
    batches = parquet.ParquetFile(path).iter_batches()
    yield from enumerate((row for b in batches for row in b.to_pylist()), 1)
  except (lib.ArrowException, OSError) as error:
    raise errors.InputError(f'{path}: not a parquet file ({error})') from error
