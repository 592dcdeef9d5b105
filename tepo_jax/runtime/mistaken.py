"""What a file is whose content is not what its name says."""

from tepo_jax.runtime import files

# The first bytes, in lower case, of what users mistake for data or a model.
_BEGINNINGS = (
    (b'version https://git-lfs', 'a pointer of Git LFS: run `git lfs pull`'),
    (b'\x1f\x8b', 'compressed: unpack it with gunzip'),
    (b'pk\x03\x04', 'a zip archive or an Excel file: unpack it, or export it '
     'as CSV'),
    (b'\xff\xfe', 'in UTF-16: save it as UTF-8'),
    (b'\xfe\xff', 'in UTF-16: save it as UTF-8'),
    (b'par1', 'a Parquet file: call it .parquet'),
    (b'<!doctype', 'a web page: download the file itself'),
    (b'<html', 'a web page: download the file itself'),
)


def hint(path: files.Path) -> str:
  """'; it is a pointer of Git LFS: run `git lfs pull`' and the like, for the
  message about a file that cannot be read; '' if nothing is known of it."""
  start = files.read_range(path, 0, 64).lstrip(b' \t\r\n').lower()
  return next((f'; it is {kind}' for beginning, kind in _BEGINNINGS
               if start.startswith(beginning)), '')
