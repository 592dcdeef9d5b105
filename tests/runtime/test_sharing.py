"""runtime.sharing: a job of two processes, of which the first has a folder."""

from tests import jobs

_SHARE = """
import pathlib, sys
import jax
from tepo_jax import errors
from tepo_jax.runtime import processes, sharing
processes.initialize()
sharing._CHUNK = 1000
rank = jax.process_index()
root = pathlib.Path(sys.argv[1])
source = root / 'snapshots' / 'abc'
files = {'config.json': b'{}', 'sub/weights': bytes(range(256)) * 9,
         'none': b''}
calls = []

def find():
  calls.append(1)
  for name, data in files.items():
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).write_bytes(data)
  return source

# The other machine: its process does not see the folder.
if rank: sharing._has = lambda folder, sizes, has=sharing._has: (
    folder != source and has(folder, sizes))
for _ in range(2):
  folder = sharing.folder_of_first(find, root / 'copies')
assert len(calls) == (0 if rank else 2)
assert folder == (root / 'copies/abc' if rank else source), folder
assert {str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob('*') if p.is_file()} == files
def refuse():
  raise errors.InputError('no such model')
try:
  sharing.folder_of_first(refuse, root)
except errors.InputError:
  print('refused')
"""


def test_the_others_get_the_first_process_s_folder(tmp_path):
  outcomes = jobs.finish(jobs.start(2, ['-c', _SHARE], str(tmp_path)))
  assert [status for status, *_ in outcomes] == [0, 0], outcomes
  assert all(out.endswith('refused\n') for _, out, _ in outcomes)
