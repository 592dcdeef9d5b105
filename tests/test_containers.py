"""launch/jobset.sh, sky.yaml and Dockerfile against their readers' schemas.

data/jobset_v1alpha2.json.gz is the CustomResourceDefinition of
kubernetes-sigs/jobset (2026-08, config/components/crd/bases), without
descriptions and with additionalProperties false; data/skypilot_task.json.gz is
get_task_schema() of skypilot 0.14.1.
"""

import gzip
import json
import pathlib
import re
import subprocess

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]

_KINDS = {'object': dict, 'array': list, 'string': str, 'integer': int,
          'number': (int, float), 'boolean': bool, 'null': type(None)}


def _schema(name):
  path = ROOT / 'tests' / 'data' / f'{name}.json.gz'
  return json.loads(gzip.decompress(path.read_bytes()))


def _is_kind(value, kind):
  return isinstance(value, _KINDS[kind]) and (
      kind == 'boolean' or not isinstance(value, bool))


def _problems(value, schema, where='$'):
  """Yields where a value does not follow a JSON schema."""
  kinds = schema.get('type', [])
  kinds = [kinds] if isinstance(kinds, str) else kinds
  if kinds and not any(_is_kind(value, kind) for kind in kinds):
    yield f'{where}: {value!r} is no {kinds}'
    return
  if 'enum' in schema and value not in schema['enum']:
    yield f'{where}: {value!r} is none of {schema["enum"]}'
  for choices in (schema.get(name) for name in ('anyOf', 'oneOf')):
    if choices and all(
        list(_problems(value, choice, where)) for choice in choices):
      yield f'{where}: {value!r} fits none of its forms'
  if isinstance(value, list):
    for index, item in enumerate(value):
      yield from _problems(item, schema.get('items', {}), f'{where}[{index}]')
  if isinstance(value, dict):
    yield from (f'{where}: no {name}' for name in schema.get('required', ())
                if name not in value)
    for name, item in value.items():
      known = schema.get('properties', {}).get(
          name, schema.get('additionalProperties', {}))
      if known is False and not any(
          re.match(p, name) for p in schema.get('patternProperties', ())):
        yield f'{where}: unknown {name}'
      elif isinstance(known, dict):
        yield from _problems(item, known, f'{where}.{name}')


def _jobset(*arguments, status=0, **environment):
  done = subprocess.run(
      [ROOT / 'launch' / 'jobset.sh', *arguments], text=True,
      capture_output=True, env={'PATH': '/usr/bin:/bin'} | environment)
  assert done.returncode == status, done.stderr
  return yaml.safe_load(done.stdout) if not status else done.stderr


def _job(jobset):
  return jobset['spec']['replicatedJobs'][0]['template']['spec']


_GKE = 'cloud.google.com/gke-'


@pytest.mark.parametrize('type_, hosts, count, labels', [
    ('v6e-1', 1, 1, {'tpu-accelerator': 'tpu-v6e-slice',
                     'tpu-topology': '1x1'}),
    ('v6e-16', 4, 4, {'tpu-accelerator': 'tpu-v6e-slice',
                      'tpu-topology': '4x4'}),
    ('v5litepod-8', 1, 8, {'tpu-accelerator': 'tpu-v5-lite-podslice',
                           'tpu-topology': '2x4'}),
    ('v5p-32', 4, 4, {'tpu-accelerator': 'tpu-v5p-slice',
                      'tpu-topology': '2x2x4'}),
    ('tpu7x-16', 2, 4, {'tpu-accelerator': 'tpu7x', 'tpu-topology': '2x2x2'}),
    ('h100x8', 1, 8, {'accelerator': 'nvidia-h100-80gb'}),
    ('h200x2x8', 2, 8, {'accelerator': 'nvidia-h200-141gb'}),
    ('a100-80x1', 1, 1, {'accelerator': 'nvidia-a100-80gb'})])
def test_a_jobset_follows_its_schema(type_, hosts, count, labels):
  arguments = ["--config.eval.sets=('a', 'b')", '--workdir=gs://b/a run']
  jobset = _jobset(*arguments, TYPE=type_, IMAGE='host/image:1', SPOT='1')
  assert not list(_problems(jobset, _schema('jobset_v1alpha2')))
  job = _job(jobset)
  assert job['completions'] == job['parallelism'] == hosts
  pod = job['template']['spec']
  assert pod['nodeSelector'] == {
      f'{_GKE}{name}': value for name, value in labels.items()
  } | {f'{_GKE}spot': 'true'}
  [container] = pod['containers']
  assert container['command'][-2:] == arguments
  assert container['securityContext']['privileged'] == (
      'tpu-topology' in labels)
  [limit] = container['resources']['limits'].items()
  assert limit == ('google.com/tpu' if 'tpu-topology' in labels
                   else 'nvidia.com/gpu', count)
  names = {item['name'] for item in container['env']}
  [again] = (item['value'] for item in container['env']
             if item['name'] == 'TEPO_COMMAND')
  assert again.startswith(
      f'TYPE={type_} IMAGE=host/image:1 SPOT=1 launch/jobset.sh '
      r"--config.eval.sets=\(\'a\'\,\ \'b\'\) --workdir=gs://b/a\ run | "
      'kubectl apply -f -')
  assert ('JAX_COORDINATOR_ADDRESS' in names) == (
      hosts > 1 and 'accelerator' in labels)


def test_only_errors_that_remain_fail_a_jobset():
  jobset = _jobset('evaluate', '--x', TYPE='v6e-16', IMAGE='i', NAME='n')
  assert jobset['metadata']['name'] == 'n'
  job = _job(jobset)
  [rule] = job['podFailurePolicy']['rules']
  assert rule['action'] == 'FailJob' and rule['onExitCodes'] == {
      'containerName': 'tepo', 'operator': 'In', 'values': [1, 2]}
  [rule] = jobset['spec']['failurePolicy']['rules']
  assert rule['action'] == 'FailJobSet'
  assert rule['onJobFailureReasons'] == ['PodFailurePolicy']
  assert job['backoffLimit'] == 0
  pod = job['template']['spec']
  assert pod['restartPolicy'] == 'Never'
  assert pod['containers'][0]['command'] == [
      '.venv/bin/python', '-m', 'tepo_jax.evaluate', '--x']
  assert {'name': 'TEPO_MULTIHOST', 'value': '1'} in pod['containers'][0]['env']


def test_a_jobset_holds_its_slice_restarts_and_has_time_to_save():
  jobset = _jobset('--x', TYPE='v6e-16', IMAGE='i')
  assert jobset['metadata']['annotations'] == {
      'alpha.jobset.sigs.k8s.io/exclusive-topology': f'{_GKE}nodepool'}
  assert jobset['spec']['failurePolicy']['maxRestarts'] == 20
  pod = _job(jobset)['template']['spec']
  assert pod['terminationGracePeriodSeconds'] == 600
  assert pod['containers'][0]['envFrom'] == [
      {'secretRef': {'name': 'tepo-secrets', 'optional': True}}]
  assert {'key': 'google.com/tpu', 'operator': 'Exists',
          'effect': 'NoSchedule'} in pod['tolerations']


def test_a_pod_with_an_account_is_not_on_the_nodes_network():
  """There GKE would give it the rights of the node pool's account."""
  for account in '', 'trainer':
    pod = _job(_jobset('--x', TYPE='v6e-16', IMAGE='i', ACCOUNT=account))[
        'template']['spec']
    assert pod.get('serviceAccountName', '') == account
    assert pod.get('hostNetwork', False) == (not account)


@pytest.mark.parametrize('arguments, environment, said', [
    ((), {'TYPE': 'v6e-16', 'IMAGE': 'i'}, 'usage'),
    (('--x',), {'TYPE': 'v6e-16'}, 'usage'),
    (('--x',), {'TYPE': 'v6e-17', 'IMAGE': 'i'}, 'TYPE=v6e-17'),
    (('--x',), {'TYPE': '2xv6e-16', 'IMAGE': 'i'},
     'TYPE=2xv6e-16: must be one slice')])
def test_jobset_refuses(arguments, environment, said):
  assert said in _jobset(*arguments, status=2, **environment)


def test_wrong_manifests_are_found():
  jobset, schema = _jobset('--x', TYPE='v6e-1', IMAGE='i'), _schema(
      'jobset_v1alpha2')
  del jobset['spec']['failurePolicy']['rules'][0]['name']
  _job(jobset)['completion'] = 1
  _job(jobset)['backoffLimit'] = '0'
  assert len(list(_problems(jobset, schema))) == 3


def test_sky_yaml_follows_its_schema():
  task = yaml.safe_load((ROOT / 'launch' / 'sky.yaml').read_text('utf-8'))
  assert not list(_problems(task, _schema('skypilot_task')))
  codes = task['resources']['job_recovery']['recover_on_exit_codes']
  assert {3, 42} <= set(codes) and not {0, 1, 2} & set(codes)
  for part in 'setup', 'run':
    subprocess.run(['bash', '-n', '-c', task[part]], check=True)
  assert list(_problems(task | {'nodes': 1}, _schema('skypilot_task')))


def test_the_image_has_what_setup_compares(tmp_path):
  """Else launch/gpu.sh would install again in each container."""
  text = (ROOT / 'launch' / 'Dockerfile').read_text('utf-8')
  copied = [word for line in re.findall(r'^COPY (.*) \S+$', text, re.M)
            for word in line.split()]
  assert all((ROOT / path).exists() for path in copied)
  compared = re.search(r'^digest\(\) \{ cat "\$@" (.*) \|', (
      ROOT / 'launch' / 'setup.sh').read_text('utf-8'), re.M)[1].split()
  assert set(compared) <= set(copied) and 'requirements.txt' in copied
