"""The rows of data sets, unchecked: local files and folders, and the hub."""

from collections.abc import Callable, Iterable, Sequence
import csv
import dataclasses
import json
import pathlib
import re
import tempfile

from tepo_jax import errors
from tepo_jax.runtime import files
from tepo_jax.runtime import mistaken

# A row's number, from 1, with the row; an InputError if it cannot be read.
Rows = Iterable[tuple[int, object]]

# `runtime.sharing.folder_of_first`: a job's first process calls the function
# that finds a folder; the others get copies of it, in the second argument.
Share = Callable[[Callable[[], pathlib.Path], pathlib.Path], pathlib.Path]

_SAVED = 'state.json'  # in a folder of `datasets.Dataset.save_to_disk`
_HUB_ID = re.compile(r'(?P<id>\w[\w.-]*/\w[\w.-]*)(:(?P<subset>[^:]+))?')


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where rows come from.

  Attributes:
    name: what messages call it. label: a short name, for ids of problems.
  """
  name: str
  label: str
  rows: Rows


def is_here(spec: str) -> bool:
  """Whether `find` reads a file or folder, not the hub."""
  return any(files.path(name).exists()
             for name in {spec, spec.rpartition('@')[0]} if name)


def find(spec: str, split: str | None, names: Sequence[str],
         share: Share | None = None) -> Origin:
  """Finds a local file or folder, or OWNER/NAME[:SUBSET] of the hub.

  The spec may end in @SPLIT; the default is `split`, or else 'train'. `names`
  are what else the user could have meant, for the message; for `share` see
  `on_hub`.

  Raises:
    InputError: there is none, or nothing of it can be read.
  """
  name, at, given = spec, '', ''
  if '@' in spec and not files.path(spec).exists():
    name, at, given = spec.rpartition('@')
  path = files.path(name)
  if path.is_dir():
    with files.downloaded(path) as local:  # the library keeps what it reads
      return Origin(spec, path.stem, _saved_rows(spec, local, given or split)
                    if (local / _SAVED).exists() else _library_rows(
                        spec, str(local), None, given or split or 'train'))
  read = READERS.get(path.suffix)
  if path.exists():
    if at:
      raise errors.InputError(f'{spec}: {path} is a file, which has no splits')
    if read is None:
      raise errors.InputError(f'{path}: not a {" or ".join(READERS)} file or a '
                              f'folder{_suffix_hint(path)}')
    if not path.is_file():
      raise errors.InputError(f'{path}: a pipe or device, not a file')
    return Origin(spec, path.stem, _file_rows(path, read))
  found = _HUB_ID.fullmatch(name)
  if found is None or read is not None:
    raise errors.InputError(
        f'{spec}: no such file, folder or set; the sets are '
        f'{", ".join(names)}; of the hub, OWNER/NAME[:SUBSET][@SPLIT]')
  try:
    return on_hub(
        found['id'], found['subset'], given or split or 'train', share)
  except errors.InputError as error:
    raise errors.InputError(
        f'{spec}: no such file or folder; as a hub id, {error}') from error


def on_hub(name: str, subset: str | None, split: str,
           share: Share | None = None) -> Origin:
  """The rows of a data set of the Hugging Face hub.

  Args:
    name, subset, split: arguments of `datasets.load_dataset`.
    share: of a job, whose processes must all call this; only the first then
      asks the hub.

  Raises:
    InputError: it cannot be loaded.
  """
  shown = f'{name}:{subset} ({split})' if subset else f'{name} ({split})'
  label = name.rpartition('/')[2]
  if share is None:
    return Origin(shown, label, _library_rows(shown, name, subset, split))
  folder = share(lambda: _kept(shown, name, subset, split), _copies())
  return Origin(shown, label, _saved_rows(shown, folder, None))


def _copies():
  import datasets  # the library; slow to import
  return pathlib.Path(datasets.config.HF_DATASETS_CACHE) / 'of_first'


def _kept(shown, name, subset, split):
  """The folder with what the library loads, by the fingerprint that it has from
  its source and revision; made unless it is there."""
  loaded = _load(shown, name, subset, split)
  folder = _copies() / loaded._fingerprint  # pylint: disable=protected-access
  try:
    if not folder.is_dir():
      folder.parent.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        loaded.save_to_disk(pathlib.Path(scratch) / folder.name)
        (pathlib.Path(scratch) / folder.name).rename(folder)
  except OSError as error:
    if not folder.is_dir():  # nor has another job made it meanwhile
      raise errors.InputError(
          f'{shown}: cannot be kept in {folder}: {errors.one_line(error)}'
          ) from error
  return folder


def _saved_rows(spec, path, split):
  """The rows of a folder that `datasets.Dataset.save_to_disk` wrote."""
  import datasets  # the library; slow to import
  try:
    saved = datasets.load_from_disk(path)
  except Exception as error:  # The library raises anything.
    raise errors.InputError(
        f'{spec}: cannot be loaded: {errors.one_line(error)}') from error
  if split and split != str(saved.split):
    raise errors.InputError(
        f'{spec}: the folder holds one data set, without splits; leave '
        f'@{split} out')
  return _read_rows(spec, saved)


def _library_rows(shown: str, path: str, subset: str | None, split: str
                  ) -> Rows:
  """The rows of what the `datasets` library can load."""
  return _read_rows(shown, _load(shown, path, subset, split))


def _load(shown, path, subset, split):
  import datasets  # the library; slow to import
  try:
    return datasets.load_dataset(path, subset, split=split)
  except Exception as error:  # The library and its hub client raise anything.
    raise errors.InputError(
        f'{shown}: cannot be loaded: {errors.one_line(error)}') from error


def _suffix_hint(path):
  if path.suffix.lower() in READERS:
    return f'; call it {path.suffix.lower()}'
  return mistaken.hint(path) if path.is_file() else ''


def _read_rows(shown, rows):
  """The numbered rows. What cannot be read (a damaged file, a date after the
  year 9999) may be found so only when several rows are read at once."""
  number = 0
  try:
    for number, row in enumerate(rows, 1):
      yield number, row
  except Exception as error:  # What pyarrow raises has no common class.
    raise errors.InputError(
        f'{shown}: cannot be read from row {number + 1} on: '
        f'{errors.one_line(error)}') from error


def _file_rows(path, read):
  """Whatever `read` yields of the file, or of a temporary copy of an object."""
  with files.downloaded(path) as local:
    yield from read(local, path)


def _object(pairs):
  if len(found := dict(pairs)) < len(pairs):
    raise ValueError('an object has two values of one name')
  return found


def _jsonl_rows(path: pathlib.Path, shown: files.Path) -> Rows:
  with path.open('rb') as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        try:
          row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
          row = errors.InputError(f'{shown}: row {number}: not JSON ({error})'
                                  f'{_json_hint(path) if number == 1 else ""}')
        yield number, row


def _json_hint(path):
  is_list = files.read_range(path, 0, 64).lstrip().startswith(b'[')
  return ('; it is a list: call it .json' if is_list and path.suffix == '.jsonl'
          else mistaken.hint(path))


def _json_rows(path: pathlib.Path, shown: files.Path) -> Rows:
  """The items of a list; of other files, the lines, as in a .jsonl file."""
  data = path.read_bytes().removeprefix(b'\xef\xbb\xbf')
  if not data.lstrip().startswith(b'['):
    yield from _jsonl_rows(path, shown)
    return
  try:
    rows = json.loads(data, object_pairs_hook=_object)
  except (ValueError, RecursionError) as error:
    raise errors.InputError(f'{shown}: not JSON ({error})') from error
  yield from enumerate(rows, 1)


def _check_names(shown, columns):
  """Refuses columns that share a name: either may be meant. Spreadsheets may
  leave several without one."""
  for name in filter(None, columns):
    if columns.count(name) > 1:
      raise errors.InputError(f'{shown}: {name!r} is the name of two columns')


def _csv_rows(path: pathlib.Path, shown: files.Path) -> Rows:
  """The rows after the header, as texts."""
  csv.field_size_limit(1 << 30)  # its default refuses long solutions
  with path.open(encoding='utf-8-sig', newline='') as file:
    reader = csv.reader(file, strict=True)
    try:
      header = next(reader, [])
      _check_names(shown, header)
      for number, cells in enumerate(filter(None, reader), 1):
        yield number, (
            dict(zip(header, cells))
            if len(cells) == len(header) else errors.InputError(
                f'{shown}: row {number}: {len(cells)} cells, but the header '
                f'has {len(header)} columns'))
    except (csv.Error, UnicodeDecodeError) as error:
      raise errors.InputError(
          f'{shown}: after line {reader.line_num}: not CSV in UTF-8 ({error})'
          f'{mistaken.hint(path)}') from error


def _parquet_rows(path: pathlib.Path, shown: files.Path) -> Rows:
  from pyarrow import lib
  from pyarrow import parquet
  try:
    file = parquet.ParquetFile(path)
  except (lib.ArrowException, OSError) as error:
    raise errors.InputError(f'{shown}: not a parquet file ({error})'
                            f'{mistaken.hint(path)}') from error
  _check_names(shown, file.schema_arrow.names)
  yield from _read_rows(shown, (
      row for batch in file.iter_batches() for row in batch.to_pylist()))


# Each takes the file on this disk, and what messages call it.
READERS: dict[str, Callable[[pathlib.Path, files.Path], Rows]] = {
    '.jsonl': _jsonl_rows, '.json': _json_rows, '.csv': _csv_rows,
    '.parquet': _parquet_rows}
